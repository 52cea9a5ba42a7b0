"""The time left of a study is told from what it trained itself, in all of its runs."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from headway.config import load_config
from headway.runtime import trial_view
from headway.runtime.trial_view import TrialView
from headway.runtime.trials import Job
from headway.study.outcome import Ending


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def trained(job: Job, num_steps: int) -> None:
    job.path.mkdir(exist_ok=True)
    (job.path / "metrics.jsonl").write_text('{"kind": "step"}\n' * num_steps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trial_view, "time", clock)
    return clock


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return [Job(tmp_path / name, load_config(None, ["num_steps=100"])) for name in ("a", "b", "c")]


def last_line(out: io.StringIO) -> str:
    return out.getvalue().splitlines()[-1]


def test_steps_that_an_earlier_study_trained_are_no_progress_of_this_one(clock: Clock, jobs: list[Job]):
    trained(jobs[0], 90)
    out = io.StringIO()
    view = TrialView(jobs, jobs, console=Console(file=out))
    trained(jobs[0], 100)
    clock.now = 60.0  # ten steps in a minute; 200 are left
    view.ended(jobs[0], Ending("finished"))
    assert last_line(out) == "1 of 3, about 20 min left: a finished"


def test_runs_that_train_beside_the_one_that_ends_count(clock: Clock, jobs: list[Job]):
    out = io.StringIO()
    view = TrialView(jobs, jobs, console=Console(file=out))
    clock.now = 60.0
    trained(jobs[0], 100)
    trained(jobs[1], 50)
    view.tick(jobs[:2])
    view.ended(jobs[0], Ending("finished"))  # 150 steps in a minute; 150 are left
    assert last_line(out) == "1 of 3, about 1 min left: a finished"
    trained(jobs[1], 100)
    view.ended(jobs[1], Ending("finished"))
    view.ended(jobs[2], Ending("failed", "exit 1: no"))
    assert last_line(out) == "3 of 3, none left: c failed: exit 1: no"


def test_steps_that_a_run_will_never_train_are_no_progress_either(clock: Clock, jobs: list[Job]):
    out = io.StringIO()
    view = TrialView(jobs, jobs, console=Console(file=out))
    trained(jobs[0], 10)
    clock.now = 60.0
    view.ended(jobs[0], Ending("diverged", "exit 1: gradient norm is nan"))
    assert "about 20 min left" in last_line(out)
