"""Faults done to whole runs: `headway train` in a process of its own, something breaks, then the books are audited.

A fault is done from inside (`install`, in the run's process before it starts), from outside (`strike`, while it runs),
by a server beside the run (`serve`) or by its task. A run survives when it trains all of its steps with all accounts in
order, after at most a few resumes where the right answer to the fault is a clean stop that says what is wrong.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from runs import ledger, records, train_arguments

DEFAULTS = {"num_steps": 16, "evaluation__every": 0, "evaluation__test_size": 0, "checkpoint__every": 5}

MOST_RUNS = 5
LIMIT_S = float(os.environ.get("HEADWAY_CHAOS_LIMIT_S", "150"))
"""A run (or resume) that takes longer hangs."""

_fork = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Run:
    """A command under way, forked off this process so that nothing is imported twice."""

    folder: Path
    log: Path
    struck: Any
    """Shared counter of faults done from inside."""
    process: Any = None
    began: float = 0.0
    left: list[str] = field(default_factory=list)
    """Commands that outlived the run that started them."""

    def start(self, arguments: list[str], install: Callable[["Run"], None] | None) -> None:
        self.process = _fork.Process(target=self._main, args=(arguments, install), daemon=False)
        self.began = time.monotonic()
        self.process.start()

    def _main(self, arguments: list[str], install: Callable[["Run"], None] | None) -> None:
        os.setsid()
        file = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # Tasks are importable in the run's own processes, as installed ones would be.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        if install is not None:
            install(self)
        from headway.cli import app

        app(arguments)

    def hit(self) -> None:
        """Count a fault done from inside."""
        with self.struck.get_lock():
            self.struck.value += 1

    @property
    def num_steps(self) -> int:
        return len(records(self.folder, "step")) if (self.folder / "metrics.jsonl").exists() else 0

    def wait_for_steps(self, num: int) -> None:
        while self.num_steps < num and self.is_running:
            time.sleep(0.05)

    @property
    def is_running(self) -> bool:
        return self.process.is_alive() and time.monotonic() - self.began < LIMIT_S

    def children(self, module: str) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            every = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in every if f"headway.{module}.server" in " ".join(child.cmdline())]
        return []

    def join(self) -> int | None:
        """The exit code; None when it had to be killed because it hung."""
        self.process.join(max(1.0, LIMIT_S - (time.monotonic() - self.began)))
        hung = self.process.is_alive()
        if not hung:
            self.left += left_behind(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        return None if hung else self.process.exitcode


def left_behind(group: int, patience_s: float = 10.0) -> list[str]:
    """Commands of a process group whose leader is gone that do not end by themselves within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (left := list(_members(group))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _members(group: int) -> Iterator[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield " ".join(process.cmdline())


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a run."""

    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run, beside those of `runs.SMALL`; dots are written as two underscores."""
    install: Callable[[Run], None] | None = None
    strike: Callable[[Run], int] | None = None
    """Returns how many faults it did."""
    serve: Callable[[Path], contextlib.AbstractContextManager[tuple[dict[str, Any], Any]]] | None = None
    """A server beside the run: its settings, and a counter of the faults it did."""
    num_strikes: int = 1
    """How many of the run and its resumes are struck."""
    stops: str = ""
    """What the run says when it stops cleanly; empty where it goes on by itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run."""

    what: str
    num_faults: int
    num_resumes: int
    survived: bool
    lost: int
    """Samples issued of which nobody knows what became."""
    num_hangs: int
    seconds: float
    note: str = ""


def undergo(fault: Fault, folder: Path, model: Path) -> Outcome:
    """Train under a fault, resume what stops, audit after every end."""
    folder.mkdir(parents=True)
    run = Run(folder / "run", folder / "log", _fork.Value("i", 0))
    begun, num_faults, num_runs, num_hangs, code = time.monotonic(), 0, 0, 0, -1
    notes: list[str] = []
    with fault.serve(model) if fault.serve else contextlib.nullcontext(({}, None)) as (more, served):
        settings = DEFAULTS | fault.settings | more
        arguments, install = train_arguments(run.folder, model, **settings), fault.install
        while code and num_runs < MOST_RUNS:
            run.start(arguments, install)
            if fault.strike is not None and num_runs < fault.num_strikes:
                num_faults += fault.strike(run)
            if (code := run.join()) is None:
                num_hangs += 1
                break
            ledger(run.folder)  # the law holds in the very state that the end left
            notes += clean_stop(run, fault) if code else []
            arguments, install, num_runs = ["resume", str(run.folder)], None, num_runs + 1
        num_faults += run.struck.value + (served.value if served is not None else 0)
    audit = ledger(run.folder)
    is_done = [record["step"] for record in records(run.folder, "step")] == list(range(settings["num_steps"]))
    if not is_done or code:
        notes.append(f"exit {code} after {run.num_steps} steps: …{run.log.read_text()[-600:]}")
    notes += [f"left behind: {command}" for command in run.left]
    num_faults = num_faults or audit["samples"]["dropped"]  # of a task that misbehaves
    lost = audit["samples_issued"] - sum(audit["samples"].values())
    seconds = time.monotonic() - begun
    survived = is_done and code == 0 and not run.left
    return Outcome(fault.what, num_faults, max(0, num_runs - 1), survived, lost, num_hangs, seconds, "; ".join(notes))


def clean_stop(run: Run, fault: Fault) -> list[str]:
    """Empty when the run said what it should have; a traceback or another word is a note."""
    text = " ".join(run.log.read_text().split())
    if "Traceback" in text or (fault.stops and not re.search(fault.stops, text)):
        return [f"stopped without a clear word: …{text[-600:]}"]
    return []
