"""A task whose tool answers once the learner has moved on, so that responses cross versions on any machine."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.envs.addition import Addition
from headway.envs.turns import Turn
from headway.types import Ints, Prompt

NUM_TURNS = 4
PATIENCE_S = 10.0 * float(os.environ.get("HEADWAY_TEST_PATIENCE", "1"))
"""Seconds without a step after which the run takes none before this very response is whole.

More than a busy machine takes to start the process that scores old log-probs: the first step waits for it.
"""


class Relay(Addition):
    """Every third question takes four turns, and between two of them the run writes a line into `metrics`.

    A turn ends at a letter from a to m. Reward 1 for an even number of digits in the last one.
    """

    def __init__(self, tokenizer: Any, *, metrics: str, digits: int = 1) -> None:
        super().__init__(tokenizer, digits=digits)
        self._metrics = Path(metrics)
        self._stops = tuple(tokenizer.convert_tokens_to_ids(list("abcdefghijklm")))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def start(self, prompt: Prompt) -> Any:
        return Leg(self._metrics, num_turns=NUM_TURNS if prompt.index % 3 == 0 else 1)

    def observe(self, text: str, after_stop: bool) -> Ints:
        return np.array(self._encode(text), np.int32)


class Leg:
    """One episode of `num_turns` turns."""

    def __init__(self, metrics: Path, num_turns: int) -> None:
        self._metrics, self._left, self._patience_s = metrics, num_turns, PATIENCE_S

    async def step(self, text: str) -> Turn:
        self._left -= 1
        if not self._left:
            return Turn(float(sum(c.isdigit() for c in text) % 2 == 0))
        await self._another_step()
        return Turn(0.0, observation="=")

    async def _another_step(self) -> None:
        before, deadline = self._num_steps(), time.monotonic() + self._patience_s
        while self._num_steps() == before:
            if time.monotonic() > deadline:
                self._patience_s = 0.0
                return
            await asyncio.sleep(0.02)

    def _num_steps(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
