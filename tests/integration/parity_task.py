"""A task that an untrained model is sometimes right at, so that its parameters move."""

from headway.envs.addition import Addition
from headway.envs.turns import SingleTurn
from headway.types import Prompt


class Parity(Addition):
    """Asks sums, rewards answers with an even number of digits in them."""

    def start(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn(lambda text: float(sum(c.isdigit() for c in text) % 2 == 0))
