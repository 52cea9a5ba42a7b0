"""Tasks whose environment misbehaves on one prompt in five: it raises, gives NaN, never answers, or blocks."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from headway.envs.addition import Addition
from headway.envs.turns import SingleTurn, Turn
from headway.types import Prompt


@dataclass(frozen=True, slots=True)
class Misbehaving:
    """An episode that goes wrong in one way."""

    how: str

    async def step(self, text: str) -> Turn:
        if self.how == "raises":
            raise RuntimeError("the tool broke")
        if self.how == "never_returns":
            await asyncio.Event().wait()
        if self.how == "blocks":
            time.sleep(3600)
        return Turn(reward=float("nan"))


class Mischief(Addition):
    """One-digit sums; `how`: `raises`, `nan`, `never_returns`, `blocks` or `prompt_raises`."""

    def __init__(self, tokenizer: Any, *, how: str, digits: int = 1) -> None:
        super().__init__(tokenizer, digits=digits)
        self._how = how

    def prompt(self, split: Any, index: int) -> Prompt:
        if self._how == "prompt_raises" and split == "train" and index % 5 == 0:
            raise OSError("the file of questions is gone")
        return super().prompt(split, index)

    def start(self, prompt: Prompt) -> Any:
        if self._how != "prompt_raises" and prompt.split == "train" and prompt.index % 5 == 0:
            return Misbehaving(self._how)
        return SingleTurn(lambda text: float(len(text) < 3))
