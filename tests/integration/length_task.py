"""One-digit sums on which an untrained model already earns rewards that differ."""

from headway.envs.addition import Addition
from headway.envs.turns import SingleTurn
from headway.types import Prompt


class ShortAnswers(Addition):
    """Reward 1 for an answer of fewer than three characters."""

    def start(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn(lambda text: float(len(text) < 3))
