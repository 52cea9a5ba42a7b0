"""A local teacher's supervision, on processes that do what a test wrote down."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.protocols import RequestRefused, TeacherLost
from headway.teacher import local
from headway.teacher.client import TeacherDied
from headway.teacher.local import LocalTeacher
from headway.teacher.messages import TeacherSettings
from headway.types import TeacherScores

TOKENS, QUERY = np.array([1, 2], np.int32), np.array([[2]], np.int32)
SCORES = TeacherScores(np.zeros((1, 1), np.float32))


class FakeTeacher:
    """Process, child and client in one. `what` is an answer, an exception, "dies" or "is silent"."""

    def __init__(self, what: Any) -> None:
        self.what, self.code, self.busy_s = what, None, 1.0
        self.process = self.child = self.client = self
        self.last_progress = time.monotonic()
        self.is_lost = False
        self._asked: list[asyncio.Future[TeacherScores]] = []

    @property
    def num_pending(self) -> int:
        return len(self._asked)

    async def score(self, token_ids: Any, query_ids: Any, num_top: int) -> TeacherScores:
        if isinstance(self.what, Exception):
            raise self.what
        if isinstance(self.what, TeacherScores):
            return self.what
        self.code = 1 if self.what == "dies" else None
        self._asked.append(asyncio.get_running_loop().create_future())
        return await self._asked[-1]

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def fail_all(self, error: Exception) -> None:
        for future in self._asked:
            future.set_exception(error)
        self._asked = []

    def close(self) -> None: ...
    def stop(self) -> None: ...
    def log_tail(self) -> str:
        return "out of memory"


def run(monkeypatch: pytest.MonkeyPatch, script: list[Any], num_asked: int = 1) -> tuple[LocalTeacher, Any, list[str]]:
    """Ask a teacher whose processes follow the script, one after another; the last one stays."""
    said: list[str] = []
    steps = iter(script)

    def start(*_: Any, **__: Any) -> FakeTeacher:
        what = next(steps, script[-1])
        if what == "does not start":
            raise RuntimeError("teacher exited with code 1")
        return FakeTeacher(what)

    monkeypatch.setattr(local, "start_teacher", start)
    monkeypatch.setattr(local, "_TICK_S", 0.01)

    async def ask() -> tuple[LocalTeacher, Any]:
        settings = TeacherSettings(model="big", student_vocab_size=9)
        teacher = LocalTeacher(settings, log_path=Path("log"), timeout_s=0.1, max_failures=3, say=said.append)
        async with asyncio.TaskGroup() as tasks:
            supervisor = tasks.create_task(teacher.run())
            answers = await asyncio.gather(*(teacher.score(TOKENS, QUERY, 0) for _ in range(num_asked)))
            supervisor.cancel()
        await teacher.close()
        return teacher, answers

    return *asyncio.run(ask()), said


def first_of(call: Callable[[], Any], kind: type[Exception]) -> Exception:
    with pytest.raises(ExceptionGroup) as failure:
        call()
    found = failure.value.exceptions[0]
    assert isinstance(found, kind)
    return found


def test_what_a_dead_teacher_owed_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    teacher, answers, said = run(monkeypatch, ["dies", "dies", SCORES], num_asked=3)
    assert answers == [SCORES] * 3
    assert teacher.num_retries == 6
    assert len(said) == 2 and "the teacher died (exit 1); restarting it" in said[0]


def test_a_teacher_that_owes_an_answer_too_long_is_replaced(monkeypatch: pytest.MonkeyPatch):
    teacher, answers, said = run(monkeypatch, ["is silent", "does not start", SCORES])
    assert answers == [SCORES] and teacher.num_retries == 1
    assert "no answer within 0.1 s" in said[0]


def test_a_teacher_that_keeps_dying_stops_the_run_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch):
    lost = first_of(lambda: run(monkeypatch, ["dies"]), TeacherLost)
    assert "failed 4 times without an answer between: exit 1; its log ends:\nout of memory" in str(lost)


def test_a_refused_request_is_no_failure_of_the_teacher(monkeypatch: pytest.MonkeyPatch):
    refused = first_of(lambda: run(monkeypatch, [RequestRefused("too long")]), RequestRefused)
    assert "too long" in str(refused)
    assert not isinstance(refused, TeacherDied)
