"""How far many runs are: a progress bar with the time left, or a line for every run that ends."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headway.runtime.trials import Job
from headway.study.outcome import Ending


class TrialView:
    """A progress bar over all steps of all runs, or on a plain stream a line for every run that ends."""

    def __init__(self, jobs: Sequence[Job], todo: Sequence[Job], *, console: Console) -> None:
        self._console, self._num_runs = console, len(jobs)
        self._left = {job.path: job.config.num_steps - _steps_trained(job.path) for job in todo}
        """Steps left of each run when this began: what an earlier study trained says nothing of the pace."""
        self._num_steps = {job.path: job.config.num_steps for job in todo}
        self._active: list[Path] = []
        self._begun, self._at_start = time.monotonic(), self._steps_left()
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[eta]}"), TimeElapsedColumn())
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(*columns, text, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=len(jobs), completed=len(jobs) - len(todo), eta="")

    def __enter__(self) -> "TrialView":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def tick(self, active: Sequence[Job]) -> None:
        self._active = [job.path for job in active]
        names = ", ".join(path.name for path in self._active)
        self._progress.update(self._task, eta=self._eta(), description=names)

    def ended(self, job: Job, end: Ending) -> None:
        del self._left[job.path]
        self._at_start -= self._num_steps[job.path] - _steps_trained(job.path)  # steps that it will never train
        self._active = [path for path in self._active if path != job.path]
        self._progress.advance(self._task)
        done = self._num_runs - len(self._left)
        reason = f": {end.reason}" if end.reason else ""
        line = f"{done} of {self._num_runs}, {self._eta()}: {job.path.name} {end.state}{reason}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _steps_left(self) -> int:
        now = {path: self._num_steps[path] - _steps_trained(path) for path in self._active if path in self._left}
        return sum((self._left | now).values())

    def _eta(self) -> str:
        left = self._steps_left()
        trained = self._at_start - left
        if not left or trained <= 0:
            return "… left" if left else "none left"
        return f"about {(time.monotonic() - self._begun) / trained * left / 60:.0f} min left"


def _steps_trained(path: Path) -> int:
    """Lines of the metrics: close enough for a bar, and cheap."""
    try:
        return (path / "metrics.jsonl").read_bytes().count(b'"kind": "step"')
    except FileNotFoundError:
        return 0
