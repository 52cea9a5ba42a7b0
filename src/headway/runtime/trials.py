"""Many ordinary runs, some side by side: each in a process of its own, resumed where it stopped."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import RunConfig, load_config
from headway.processes.child import tail
from headway.processes.stops import stops_heeded
from headway.report.jsonl import read_records
from headway.runtime.run_folder import RunFolder, write_atomically
from headway.study.outcome import Ending

_TICK_S = 0.2
_DIVERGED, _FAILED = "diverged", "failed"

_NOT_FINITE = ("gradient norm is", "is not finite", "as the policy being trained gave it")
"""What a run says that ends on gradients, parameters, or outputs of its policy that are NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make, in a folder of its own."""

    path: Path
    config: RunConfig


@dataclass(frozen=True, slots=True)
class _Active:
    job: Job
    process: "subprocess.Popen[bytes]"


def ending(path: Path) -> Ending | None:
    """How the run in a folder stopped; None while it is not begun or not ended."""
    if not (path / "config.toml").is_file():
        return None
    folder, config = RunFolder.open(path)
    finished = config.num_steps in folder.checkpoint_versions() and _is_evaluated(folder, config)
    # A run that outlived its study may have finished after a second process failed on its folder.
    for state in (_DIVERGED,) if finished else (_DIVERGED, _FAILED):
        if (path / state).is_file():
            return Ending(state, (path / state).read_text().strip())
    return Ending("finished") if finished else None


def _is_evaluated(folder: RunFolder, config: RunConfig) -> bool:
    """Whether the test, which follows the last checkpoint, is on record where one is asked for."""
    found = ((r["split"], r["policy_version"]) for r in read_records(folder.metrics_path) if r["kind"] == "evaluation")
    return not config.evaluation.test_size or ("test", config.num_steps) in found


def forgive(path: Path) -> None:
    """Let a run that failed be tried again."""
    (path / _FAILED).unlink(missing_ok=True)


def differing_settings(job: Job) -> list[str]:
    """Settings of the run that is in the folder already, where they are not the job's."""
    if not (job.path / "config.toml").is_file():
        return []
    # What was asked for: `RunFolder.open` would put what the run has decided since in the place of "auto".
    stored, asked = load_config(job.path / "config.toml").model_dump(), job.config.model_dump()
    return [f"{key} = {stored[key]}, not {asked[key]}" for key in asked if stored[key] != asked[key]]


def run_all(
    jobs: Sequence[Job],
    *,
    num_parallel: int,
    on_end: Callable[[Job, Ending], None],
    on_tick: Callable[[Sequence[Job]], None] = lambda active: None,
) -> None:
    """Run every job to its end, `num_parallel` at a time; one that fails does not stop the others.

    Killed at any point, the same call goes on: it resumes what was begun, and waits for a run that outlived its
    study. Stopped by Ctrl-C, SIGTERM, SIGHUP or an exception, it stops its runs in order, and at a second
    signal at once; they can be resumed. Raises KeyboardInterrupt after a stop.
    """
    waiting, active = list(jobs), list[_Active]()
    with stops_heeded(again=lambda: _terminate(active)) as is_stopped:
        try:
            while (waiting or active) and not is_stopped():
                for one in [one for one in active if one.process.poll() is not None]:
                    active.remove(one)
                    if one.process.returncode and _is_held(one.job.path):  # a run that outlived an earlier study
                        waiting.append(one.job)
                    else:
                        on_end(one.job, _conclude(one))
                free = [job for job in waiting if not _is_held(job.path)] if len(active) < num_parallel else []
                for job in free[: num_parallel - len(active)]:
                    waiting.remove(job)
                    found = ending(job.path)  # it may have been held by a run that has ended since
                    if found is None:
                        active.append(_start(job))
                    else:
                        on_end(job, found)
                on_tick([one.job for one in active])
                time.sleep(_TICK_S)
        finally:
            _terminate(active)
            for one in active:
                one.process.wait()
        if is_stopped():
            raise KeyboardInterrupt


def _terminate(active: Sequence[_Active]) -> None:
    for one in active:
        one.process.terminate()


def _start(job: Job) -> _Active:
    """Begin or resume a run; its output goes to `train.log` in its folder."""
    if not (job.path / "config.toml").is_file():
        RunFolder.create(job.path, job.config)
    command = [sys.executable, "-m", "headway", "resume", str(job.path)]
    with (job.path / "train.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"COLUMNS": "120"},
            process_group=0,  # Ctrl-C reaches the study alone, which asks each run once: a second time cuts a step off
        )
    return _Active(job, process)


def _conclude(one: _Active) -> Ending:
    """What became of a process that has exited; noted in the folder unless it finished."""
    if one.process.returncode == 0:
        return Ending("finished")
    text = tail(one.job.path / "train.log", 20)
    state = _DIVERGED if any(sign in text for sign in _NOT_FINITE) else _FAILED
    reason = f"exit {one.process.returncode}: {_last_error(text)}"
    write_atomically(one.job.path / state, reason + "\n")
    return Ending(state, reason)


def _last_error(text: str) -> str:
    """The last line that says error, or the last line there is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")


def _is_held(path: Path) -> bool:
    """Whether another process trains in this folder."""
    if not (path / "lock").is_file():
        return False
    with (path / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
