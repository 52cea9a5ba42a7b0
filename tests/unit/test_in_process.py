"""The engine inside this process: a fault of a step reaches whoever waits."""

import asyncio
from typing import Any

import numpy as np
import pytest
from scripted import completion

from headway.engine.in_process import InProcessEngine
from headway.types import Sampling


class Faulty:
    """A `TorchEngine` whose first step raises and whose later ones finish everything."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, id: Any, token_ids: object, sampling: Sampling) -> None:
        self._waiting.append(id)

    def cancel(self, id: Any) -> None: ...

    def clear(self) -> None:
        self._waiting.clear()

    def step(self) -> list[Any]:
        self._steps += 1
        if self._steps == 1:
            raise RuntimeError("out of memory")
        done, self._waiting = self._waiting, []
        return [(id, completion([1], [0])) for id in done]


def test_a_step_that_raises_fails_every_request_and_the_engine_serves_the_next_one():
    async def main() -> list[Any]:
        engine = InProcessEngine(Faulty(), dtype="float32")  # pyright: ignore[reportArgumentType]
        ask = [engine.generate(np.array([1], np.int32), Sampling(max_tokens=1)) for _ in range(3)]
        async with asyncio.timeout(5):
            failed = await asyncio.gather(*ask[:2], return_exceptions=True)
            return [*failed, await ask[2]]

    *failed, answer = asyncio.run(main())
    assert [str(error) for error in failed] == ["out of memory"] * 2
    assert answer.token_ids.tolist() == [1]


def test_the_first_fault_is_what_fresh_samples_fail_with():
    async def main() -> None:
        engine = InProcessEngine(Faulty(), dtype="float32")  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(5):
            await engine.generate(np.array([1], np.int32), Sampling(max_tokens=1))

    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(main())
