"""The check of an engine's log-probs against the learner's."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headway.engine.conformance import Conformance, EngineDisagrees
from headway.protocols import EngineDied
from headway.types import Completion, Ints, Sampling, SideData

PROMPTS = [np.array(p, np.int32) for p in ([1], [2, 3])]
ROWS = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], np.float32))


@dataclass
class Fixed:
    """Answers a prompt of n tokens with row n − 1, moved by `shift`."""

    shift: float = 0.0
    dead: bool = False
    num_asked: int = 0

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        self.num_asked += 1
        if self.dead:
            raise EngineDied("gone")
        row = ROWS[len(token_ids) - 1]
        top = np.argsort(-row)[: sampling.num_top].astype(np.int32)
        side = SideData(top_ids=top[None], top_logprobs=(row[top] + self.shift)[None])
        return Completion(top[:1], np.zeros(1, np.int32), "length", side=side)


def check(engines: Any, *, every: int = 1, versions: Any = (0,)) -> Conformance:
    conformance = Conformance(PROMPTS, score=lambda: ROWS, every=every, tolerance=0.01)

    async def work() -> None:
        for version in versions:
            conformance.remember(version)
            await conformance.check(version, engines)

    asyncio.run(work())
    return conformance


def test_the_worst_engine_is_named_with_its_distance():
    with pytest.raises(EngineDisagrees, match=r"^b says it holds version 0.*by 0\.1 nats"):
        check({"a": Fixed(), "b": Fixed(0.1)})
    assert check({"a": Fixed(), "b": Fixed(0.001)}).last_delta == pytest.approx(0.001, rel=1e-3)


def test_a_distance_that_is_no_number_is_no_agreement():
    for engines in ({"b": Fixed(float("nan"))}, {"a": Fixed(), "b": Fixed(float("nan"))}):
        with pytest.raises(EngineDisagrees, match=r"^b says"):
            check(engines)


def test_the_distance_reported_is_that_of_the_worst_engine_however_late_each_was_checked():
    conformance: Any = Conformance(PROMPTS, score=lambda: ROWS, every=1, tolerance=0.01)

    async def work() -> None:
        conformance.remember(3)
        await conformance.check(3, {"a": Fixed(0.002)})
        await conformance.check(3, {"b": Fixed(0.001)})
        assert conformance.last_delta == pytest.approx(0.002, rel=1e-3)
        conformance.remember(4)
        await conformance.check(4, {"b": Fixed(0.001)})
        assert conformance.last_delta == pytest.approx(0.001, rel=1e-3)

    asyncio.run(work())


def test_a_dead_engine_is_left_to_its_supervisor():
    assert check({"a": Fixed(dead=True), "b": Fixed()}).last_delta == 0
    assert check({"a": Fixed(dead=True)}).last_delta is None


@pytest.mark.parametrize(("every", "expected"), [(0, 1), (1, 6), (2, 4)])
def test_the_first_version_and_every_nth_are_checked(every: int, expected: int):
    engine = Fixed()
    check({"a": engine}, every=every, versions=(3, 4, 5, 6, 7, 8))
    assert engine.num_asked == expected * len(PROMPTS)
