"""The teacher's stage of an episode: what it asks for, what it refuses, what it tells whoever waits."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.rollout.scoring import BadScores, check_scores
from headway.runtime.scoring import TeacherStage
from headway.runtime.waits import Waits
from headway.training.batching import collate
from headway.types import Batch, Group, Ints, Prompt, Response, SideData, TeacherScores

PROMPT = Prompt(3, "train", np.array([5, 6], np.int32))
TOKENS = np.array([7, 8, 9], np.int32)
SIDE = SideData(top_ids=np.arange(15, dtype=np.int32).reshape(3, 5), top_logprobs=np.full((3, 5), -2.0, np.float32))
RESPONSE = Response(
    token_ids=TOKENS,
    mask=np.ones(3, np.bool_),
    versions=np.zeros(3, np.int32),
    reward=0.0,
    side=SIDE,
)


class FakeTeacher:
    """Answers −1 everywhere once it may; keeps what it was asked."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked: list[tuple[Ints, Ints, int]] = []
        self.busy_s, self.num_retries = 0.0, 0

    async def score(self, token_ids: Ints, query_ids: Ints, num_top: int) -> TeacherScores:
        self.asked.append((token_ids, query_ids, num_top))
        await self.may_answer.wait()
        self.busy_s += 0.25
        own = np.full(query_ids.shape, -1.0, np.float32)
        if not num_top:
            return TeacherScores(own)
        ids = np.zeros((len(own), num_top), np.int32)
        return TeacherScores(own, ids, np.full(ids.shape, -1.5, np.float32))

    async def run(self) -> None: ...
    async def close(self) -> None: ...
    def describe(self) -> str:
        return "the teacher at home"


def stage_of(teacher: FakeTeacher, said: list[str] | None = None, **options: Any) -> TeacherStage:
    waits = Waits(limit_s=0.02, say=(said if said is not None else []).append)
    options = {"kind": "student_topk", "num_top": 0, "width": 3, "vocab_size": 100, "latency_s": 0.0} | options
    return TeacherStage(teacher, knob="distill.top_k", waits=waits, **options)


def scored(**options: Any) -> tuple[FakeTeacher, Response, dict[str, float]]:
    async def once() -> tuple[FakeTeacher, Response, dict[str, float]]:
        teacher = FakeTeacher()
        teacher.may_answer.set()
        stage = stage_of(teacher, **options)
        response = await stage.score(PROMPT, RESPONSE)
        return teacher, response, stage.metrics()

    return asyncio.run(once())


def test_only_as_many_of_the_most_likely_ids_are_cached_as_the_distillation_asks_for():
    """The engine reports more where an entropy bound needs them: teacher, record and loss see the first k alone."""
    teacher, response, metrics = scored(width=3)
    _, queried, _ = teacher.asked[0]
    assert queried.tolist() == [[7, 0, 1], [8, 5, 6], [9, 10, 11]]
    assert response.side.teacher_logprobs is not None and response.side.teacher_logprobs.shape == (3, 3)
    assert response.side.top_ids is not None and response.side.top_ids.shape == (3, 5)
    rows = collate(Batch(0, 0, (Group(0, PROMPT, (response,)),)), pad_id=0, cache="student_topk")
    assert rows.cached_ids is not None and rows.cached_ids[0, 2:].tolist() == queried.tolist()
    assert metrics["cache_bytes_per_token"] == 3 * 8 and metrics["vocabulary_bytes_per_token"] == 400


def test_the_teachers_own_top_comes_beside_the_token():
    teacher, response, _ = scored(kind="teacher_topk", num_top=4, width=5)
    tokens, queried, num_top = teacher.asked[0]
    assert tokens.tolist() == [5, 6, 7, 8, 9] and queried.tolist() == [[7], [8], [9]] and num_top == 4
    assert response.side.teacher_ids is not None and response.side.teacher_ids.shape == (3, 4)
    assert response.side.teacher_logprobs is not None
    assert response.side.teacher_logprobs.tolist() == [[-1.0, -1.5, -1.5, -1.5, -1.5]] * 3


def test_waiting_responses_are_counted_and_whoever_waits_long_is_told_for_whom():
    async def wait() -> tuple[list[str], str, TeacherStage]:
        said: list[str] = []
        teacher = FakeTeacher()
        stage = stage_of(teacher, said)
        waiting = [asyncio.create_task(stage.score(PROMPT, RESPONSE)) for _ in range(2)]
        watching = asyncio.create_task(stage._waits.watch())
        while not said:
            await asyncio.sleep(0.01)
        meanwhile = stage.describe()
        assert stage.metrics()["num_scoring"] == 2
        waiting.pop().cancel()
        teacher.may_answer.set()
        await asyncio.gather(*waiting)
        watching.cancel()
        return said, meanwhile, stage

    said, meanwhile, stage = asyncio.run(wait())
    assert meanwhile == "2 responses wait for the teacher at home"
    assert said[0].startswith("starvation: a response has waited 0 s for the teacher at home; the knob: distill.top_k")
    assert stage.num_waiting == 0


def test_a_report_is_of_the_time_since_the_last_one():
    async def twice() -> list[dict[str, float]]:
        teacher = FakeTeacher()
        teacher.may_answer.set()
        stage = stage_of(teacher, latency_s=0.05)
        await stage.score(PROMPT, RESPONSE)
        first = stage.metrics()
        teacher.num_retries = 2
        return [first, stage.metrics()]

    first, second = asyncio.run(twice())
    assert first["teacher_wait_s"] >= 0.05 and first["teacher_busy"] == 1.0 and first["teacher_retries"] == 0
    assert second["teacher_wait_s"] == 0.0 and second["teacher_busy"] == 0.0 and second["teacher_retries"] == 2


GOOD = TeacherScores(np.full((2, 3), -1.0, np.float32), np.zeros((2, 4), np.int32), np.full((2, 4), -1.0, np.float32))


def with_value(value: float) -> np.ndarray:
    values = np.full((2, 3), -1.0, np.float32)
    values[1, 2] = value
    return values


def test_scores_within_the_contract_pass():
    check_scores(GOOD, (2, 3), 4, "prompt")
    check_scores(replace(GOOD, logprobs=with_value(5e-5)), (2, 3), 4, "prompt")
    check_scores(TeacherScores(GOOD.logprobs), (2, 3), 0, "prompt")


@pytest.mark.parametrize(
    ("scores", "complaint"),
    [
        (
            replace(GOOD, logprobs=GOOD.logprobs[:1]),
            r"log-probs of shape \(1, 3\), expected \(2, 3\); it must",
        ),
        (replace(GOOD, top_ids=None), r"top ids of shape none, expected \(2, 4\)"),
        (
            replace(GOOD, top_logprobs=np.zeros((2, 3), np.float32)),
            r"top log-probs of shape \(2, 3\), expected \(2, 4\)",
        ),
        *(
            (replace(GOOD, logprobs=with_value(value)), "not a finite number <= 0; check the weights it loads")
            for value in (np.nan, -np.inf, 5e-4)
        ),
    ],
)
def test_scores_that_break_the_contract_are_refused_with_the_prompt_and_the_mend(scores: TeacherScores, complaint: str):
    with pytest.raises(BadScores, match=rf"^prompt train/3: the teacher gave .*{complaint}"):
        check_scores(scores, (2, 3), 4, "prompt train/3")
