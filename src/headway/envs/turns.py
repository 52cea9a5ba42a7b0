"""What every environment answers with."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to one turn of the policy.

    Example: `Turn(reward=0.0, observation="42")` shows a tool's result; `Turn(reward=1.0)` ends the episode.
    """

    reward: float
    observation: str | None = None


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """An episode of one turn: the reward is `grade(text)`."""

    grade: Callable[[str], float]

    async def step(self, text: str) -> Turn:
        return Turn(reward=self.grade(text))
