"""`headway study`: check every combination, run what has not ended, keep the table, sum up over the seeds."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from headway.config import ConfigError, RunConfig
from headway.report.jsonl import read_records
from headway.runtime.checks import check, check_losses
from headway.runtime.launch import check_engine
from headway.runtime.law import apply_law
from headway.runtime.reporting import check_sinks
from headway.runtime.task import Task, check_environment, open_task
from headway.runtime.trial_view import TrialView
from headway.runtime.trials import Job, differing_settings, ending, forgive, run_all
from headway.study.design import Study, Trial, refuse_all
from headway.study.outcome import Ending, Outcome, read_outcome
from headway.study.results import Results

Say = Callable[[str], None]


@dataclass(slots=True)
class Ended:
    """What is known of a study's runs so far, by name of the trial."""

    endings: dict[str, Ending] = field(default_factory=dict)
    outcomes: dict[str, Outcome | None] = field(default_factory=dict)
    """None for a run that failed."""


def check_study(study: Study, folder: Path, *, say: Say) -> list[Job]:
    """The jobs of a study, every one checked as `headway train` would, its first model built.

    Raises ConfigError with all combinations that could not run, and those whose folder holds another run.
    """
    said: list[str] = []
    jobs = [Job(run_path(folder, trial), apply_law(trial.config, said.append)) for trial in study.trials]
    for notice in dict.fromkeys(said):
        say(notice)
    tasks: dict[str, Task] = {}
    complaints: dict[str, list[str]] = {}
    for needs_model in (False, True):  # all that is quick to check before the first model is built
        for job in jobs:
            try:
                _check(job.config, tasks, say) if needs_model else _check_settings(job)
            except ConfigError as error:
                complaints.setdefault(str(error), []).append(job.path.name)
        refuse_all(complaints)
    return jobs


def _check_settings(job: Job) -> None:
    for checked in (check_losses, check_engine, check_environment, check_sinks):
        checked(job.config)
    if differing := differing_settings(job):
        raise ConfigError(f"the folder holds a run with other settings ({'; '.join(differing)}); name another --out")


def _check(config: RunConfig, tasks: dict[str, Task], say: Say) -> None:
    """With the task, which is opened once for all runs that share it: a cold start in the runs would be made twice."""
    key = repr((config.model, config.task, config.distill, config.seed))
    if key not in tasks:
        tasks[key] = open_task(config, say=say)
    check(config, tasks[key])


def run_path(folder: Path, trial: Trial) -> Path:
    """Where a trial's run folder is."""
    return folder / "runs" / trial.name


def run_study(study: Study, folder: Path, *, num_parallel: int, retry: bool, console: Console, say: Say) -> Ended:
    """Run every trial that has not ended and keep `results.sqlite`. The same call continues a stopped study."""
    jobs = check_study(study, folder, say=say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; name another --out") from None
    with _hold(folder):
        return _run(study, jobs, folder, num_parallel=num_parallel, retry=retry, console=console)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Keep a second study out of the folder. Raises ConfigError while another is at work there."""
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use by another study; wait for it or name another --out") from None
        yield


def _run(study: Study, jobs: list[Job], folder: Path, *, num_parallel: int, retry: bool, console: Console) -> Ended:
    results, found = Results(folder / "results.sqlite"), Ended()
    trials = {job.path: trial for job, trial in zip(jobs, study.trials, strict=True)}

    def record(job: Job, end: Ending) -> None:
        trial = trials[job.path]
        found.endings[trial.name] = end
        found.outcomes[trial.name] = outcome = _outcome(job, end, study.goal)
        results.put(trial, end, outcome)

    todo = []
    for job in jobs:
        if retry:
            forgive(job.path)
        end = ending(job.path)
        todo.append(job) if end is None else record(job, end)
    if todo:
        parallel = num_parallel or study.jobs or os.cpu_count() or 1
        with TrialView(jobs, todo, console=console) as view:

            def conclude(job: Job, end: Ending) -> None:
                record(job, end)
                view.ended(job, end)

            run_all(todo, num_parallel=parallel, on_end=conclude, on_tick=view.tick)
    return found


def _outcome(job: Job, end: Ending, goal: float) -> Outcome | None:
    if end.state == "failed":
        return None
    records = list(read_records(job.path / "metrics.jsonl"))
    return read_outcome(records, job.config, goal=goal, finished=end.state == "finished")
