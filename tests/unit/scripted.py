"""An engine that returns what a test wrote down, and an environment made of one function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.envs.turns import Turn
from headway.types import (
    Completion,
    EngineStatus,
    FinishReason,
    Ints,
    LogprobOrigin,
    Prompt,
    Sampling,
    SideData,
    Split,
    WeightRef,
)

Script = list[Completion] | list[Completion | Exception]
_ALL = object()


def completion(
    token_ids: Sequence[int],
    versions: Sequence[int],
    finish_reason: FinishReason = "stop",
    logprobs: Sequence[float] | object | None = _ALL,
    side: SideData | None = None,
) -> Completion:
    """Log-probs of −1 unless told otherwise."""
    values: Any = [-1.0] * len(token_ids) if logprobs is _ALL else logprobs
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        versions=np.array(versions, np.int32),
        finish_reason=finish_reason,
        logprobs=None if values is None else np.array(values, np.float32),
        side=side or SideData(),
    )


@dataclass
class ScriptedEngine:
    script: Script
    requests: list[tuple[Ints, Sampling]] = field(default_factory=list)

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        step = self.script[len(self.requests)]
        self.requests.append((token_ids, sampling))
        if isinstance(step, Exception):
            raise step
        return step

    async def update_weights(self, ref: WeightRef) -> None: ...
    async def interrupt(self) -> None: ...
    async def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, 0.0, 0.0)

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        return LogprobOrigin("behavior", "scripted", "float32", sampling.temperature)


@dataclass
class TextEnvironment:
    """Observations are shown as their bytes, after "!" where the policy left its message open."""

    answer: Callable[[str], Turn]
    stop_token_ids: tuple[int, ...] = (0,)

    def size(self, split: Split) -> int:
        return 1

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, split, np.array([1, 2, 3], np.int32))

    def start(self, prompt: Prompt) -> "TextEnvironment":
        return self

    async def step(self, text: str) -> Turn:
        return self.answer(text)

    def observe(self, text: str, after_stop: bool) -> Ints:
        return np.frombuffer((b"" if after_stop else b"!") + text.encode(), np.uint8).astype(np.int32)
