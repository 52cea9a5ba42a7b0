"""A local teacher's supervision, on processes that do what a test wrote down."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headway.processes.child import start_child
from headway.protocols import RequestRefused, TeacherLost
from headway.teacher import local
from headway.teacher.client import TeacherDied
from headway.teacher.local import LocalTeacher
from headway.teacher.messages import TeacherSettings
from headway.types import TeacherScores

TOKENS, QUERY = np.array([1, 2], np.int32), np.array([[2]], np.int32)
SCORES = TeacherScores(np.zeros((1, 1), np.float32))


class FakeTeacher:
    """Process, child and client in one. `what` is an answer, an exception, "dies", "is silent" or "babbles"."""

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
        if self.what == "babbles":
            self.is_lost = True
            raise TeacherDied("malformed")
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


def run(
    monkeypatch: pytest.MonkeyPatch, script: list[Any], num_asked: int = 1, tick_s: float = 0.01
) -> tuple[LocalTeacher, Any, list[str]]:
    """Ask a teacher whose processes follow the script, one after another; the last one stays."""
    said: list[str] = []
    steps = iter(script)

    def start(*_: Any, **__: Any) -> FakeTeacher:
        what = next(steps, script[-1])
        if what == "does not start":
            raise RuntimeError("teacher exited with code 1")
        return FakeTeacher(what)

    monkeypatch.setattr(local, "start_teacher", start)
    monkeypatch.setattr(local, "_TICK_S", tick_s)

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
    assert "no answer within distill.timeout_s = 0.1 s" in said[0] and "raise distill.timeout_s" in said[0]


def test_one_that_answers_nonsense_is_replaced_and_not_asked_over_and_over_until_then(monkeypatch: pytest.MonkeyPatch):
    teacher, answers, said = run(monkeypatch, ["babbles", SCORES], num_asked=3, tick_s=0.2)
    assert answers == [SCORES] * 3 and teacher.num_retries == 3
    assert len(said) == 1 and "its answer made no sense" in said[0]


def test_a_teacher_that_keeps_dying_stops_the_run_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch):
    lost = first_of(lambda: run(monkeypatch, ["dies"]), TeacherLost)
    assert "failed 4 times without an answer between; if memory ran out (also the GPU's), lower distill.batch" in str(
        lost
    )
    assert str(lost).endswith("The last time: exit 1; its log ends:\nout of memory")


@pytest.mark.parametrize(
    ("what", "mends"),
    [
        ("is silent", ["distill.timeout_s = 0.1 s", "distill.num_threads", "distill.batch_tokens"]),
        ("does not start", ["check distill.teacher and distill.device", "exited with code 1"]),
        ("babbles", ["see its log"]),
    ],
)
def test_each_way_to_fail_names_what_to_change(monkeypatch: pytest.MonkeyPatch, what: str, mends: list[str]):
    lost = str(first_of(lambda: run(monkeypatch, [what]), TeacherLost))
    assert all(mend in lost for mend in [*mends, "then `headway resume` the run"])


def test_a_refused_request_is_no_failure_of_the_teacher(monkeypatch: pytest.MonkeyPatch):
    refused = first_of(lambda: run(monkeypatch, [RequestRefused("too long")]), RequestRefused)
    assert "too long" in str(refused)
    assert not isinstance(refused, TeacherDied)


@pytest.mark.parametrize("starts", [False, True])
def test_a_stop_while_the_model_loads_ends_the_process(monkeypatch: pytest.MonkeyPatch, starts: bool):
    """Whether the start can still be given up or comes to its end all the same."""
    late, stopped = FakeTeacher(SCORES), []
    monkeypatch.setattr(late, "stop", lambda: stopped.append(late))

    def load(*_: Any, is_wanted: Callable[[], bool], **__: Any) -> FakeTeacher:
        loading.set()
        while is_wanted():
            time.sleep(0.01)
        if not starts:
            raise RuntimeError("teacher was told to end")
        return late

    monkeypatch.setattr(local, "start_teacher", load)
    loading = threading.Event()

    async def stop_early() -> None:
        settings = TeacherSettings(model="big", student_vocab_size=9)
        teacher = LocalTeacher(settings, log_path=Path("log"), timeout_s=0.1, max_failures=3, say=print)
        supervisor = asyncio.create_task(teacher.run())
        await asyncio.to_thread(loading.wait, 5)
        supervisor.cancel()
        await asyncio.wait([supervisor])
        await asyncio.wait_for(teacher.close(), 5)

    asyncio.run(stop_early())
    assert stopped == [late] * starts


def test_a_start_that_is_not_wanted_any_more_ends_its_process(tmp_path: Path):
    pid = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="sleeper was told to end"):
        start_child(
            "sleeper",
            {"PYTHONPATH": str(tmp_path)},
            what="sleeper",
            log_path=tmp_path / "log",
            start_timeout_s=60,
            is_wanted=lambda: not (pid.exists() and pid.read_text()),
        )
    assert time.monotonic() - begun < 30
    assert not psutil.pid_exists(int(pid.read_text()))
