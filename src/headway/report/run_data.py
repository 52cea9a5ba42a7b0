"""A run folder as the report sees it: whatever is there, and in words what is not."""

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import ledger_file
from headway.accounts import Audit, audit_file
from headway.errors import HeadwayError

Row = dict[str, Any]


class NoRun(HeadwayError, ValueError):
    """The path holds nothing that a run left."""


class JsonLines:
    """The records of a file that may still grow; `read` returns those that came since the last call.

    A last line without its newline is not a record yet. A whole line that is no JSON object is left out and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[int] = []
        """Numbers of the lines left out."""
        self._offset = self._num_lines = self._inode = 0

    def read(self) -> Iterator[Row]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._num_lines += 1
                row = _object(line)
                if row is None:
                    self.damaged.append(self._num_lines)
                else:
                    yield row

    @property
    def rewritten(self) -> bool:
        """Whether another file took its place, as when a run is resumed: it is to be read from its beginning."""
        if not self._inode or not self.path.is_file():
            return False
        found = self.path.stat()
        return found.st_ino != self._inode or found.st_size < self._offset


def _object(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


@dataclass(slots=True)
class RunData:
    """All that one run left behind. `problems` says what is missing or damaged, and why."""

    path: Path
    name: str
    config: Row = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    spans: list[Row] = field(default_factory=list)
    audit: Audit | None = None
    problems: list[str] = field(default_factory=list)

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of config.toml.

        >>> RunData(Path("r"), "r", config={"task": {"name": "gsm8k"}}).setting("task.name")
        'gsm8k'
        """
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def column(self, metric: str) -> list[float | None]:
        """One value a step, None where a step does not have it."""
        return [value if isinstance(value := step.get(metric), int | float) else None for step in self.steps]

    def has(self, *metrics: str) -> bool:
        """Whether any step has any of these."""
        return any(step.get(metric) is not None for step in self.steps for metric in metrics)


class RunReader:
    """Reads a folder again and again, only what is new; never writes and never locks."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        if not path.is_dir() or not any((path / file).exists() for file in ("config.toml", "metrics.jsonl")):
            inside = sorted(config.parent.name for config in path.glob("*/config.toml"))
            hint = f"; it holds runs, such as {path / inside[0]}: give those" if inside else ""
            raise NoRun(f"{path} is not a run folder: it has neither config.toml nor metrics.jsonl{hint}")
        self._path = path
        self._name = name or path.resolve().name
        self._restart()

    def _restart(self) -> None:
        self._metrics = JsonLines(self._path / "metrics.jsonl")
        self._timeline = JsonLines(self._path / "timeline.jsonl")
        self._steps: dict[int, Row] = {}
        self._evaluations: list[Row] = []
        self._spans: list[Row] = []
        self._audit: Audit | None = None
        self._audit_problems: list[str] = []
        self._next_audit = 0
        """Steps at which the accounts are proved again."""

    @property
    def stamp(self) -> str:
        """Changes when the run has written anything."""
        files = (self._metrics.path, self._timeline.path, self._path / "ledger.sqlite")
        return "-".join(str(file.stat().st_size) if file.is_file() else "0" for file in files)

    def read(self) -> RunData:
        if self._metrics.rewritten or self._timeline.rewritten:
            self._restart()
        for row in self._metrics.read():
            if row.get("kind") == "step" and isinstance(row.get("step"), int):
                self._steps[row["step"]] = row
            elif row.get("kind") == "evaluation":
                self._evaluations.append(row)
        self._spans += [span for span in self._timeline.read() if _is_span(span)]
        run = RunData(self._path, self._name)
        run.steps = [self._steps[step] for step in sorted(self._steps)]
        run.evaluations = list(self._evaluations)
        run.spans = list(self._spans)
        run.config = _guarded(lambda: _config(self._path), run.problems) or {}
        run.audit = self._prove(run)
        run.problems += self._audit_problems
        run.problems += self._complaints(run)
        return run

    def _prove(self, run: RunData) -> Audit | None:
        """The accounts. A proof reads the whole ledger, so it is made again only when the run has grown by a tenth."""
        num_steps = len(run.steps)
        if num_steps >= self._next_audit or num_steps == run.setting("num_steps"):
            self._next_audit = num_steps + max(1, num_steps // 10)
            self._audit_problems = []
            self._audit = _guarded(lambda: _audit(self._path, run.setting("max_staleness")), self._audit_problems)
        return self._audit

    def _complaints(self, run: RunData) -> Iterator[str]:
        for file in (self._metrics, self._timeline):
            if file.damaged:
                lines = ", ".join(map(str, file.damaged[:5])) + (" …" if len(file.damaged) > 5 else "")
                yield f"{file.path.name}: {len(file.damaged)} damaged lines are left out ({lines})"
        if not self._metrics.path.is_file():
            yield "metrics.jsonl is missing: nothing was logged here"
        elif not run.steps:
            yield "metrics.jsonl holds no step yet"
        num_steps = run.setting("num_steps")
        if run.steps and isinstance(num_steps, int) and len(run.steps) < num_steps:
            age = time.time() - self._metrics.path.stat().st_mtime
            yield f"{len(run.steps)} of {num_steps} steps so far; the last one was logged {_ago(age)} before this page"


def _is_span(row: Row) -> bool:
    times = row.get("start"), row.get("end")
    return all(isinstance(t, int | float) for t in times) and "lane" in row and "what" in row


def _config(path: Path) -> Row:
    file = path / "config.toml"
    if not file.is_file():
        raise NoRun("config.toml is missing, so settings are unknown")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NoRun(f"config.toml is damaged: {error}") from error


def _audit(path: Path, max_staleness: Any) -> Audit:
    bound = max_staleness if isinstance(max_staleness, int) else None
    try:
        return audit_file(path / "ledger.sqlite", max_staleness=bound)
    except ledger_file.DAMAGED_FILE as error:
        raise NoRun(f"ledger.sqlite is damaged: {error}") from error


def _guarded(read: Callable[[], Any], problems: list[str]) -> Any:
    """What could be read; otherwise None, and the reason among the problems."""
    try:
        return read()
    except HeadwayError as error:
        problems.append(str(error))
        return None


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Every folder once, under names that differ. Raises NoRun."""
    return [reader.read() for reader in open_runs(paths)]


def open_runs(paths: Sequence[Path]) -> list[RunReader]:
    """Readers of these folders; folders of the same name are told apart by the one they lie in. Raises NoRun."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in paths]
    return [RunReader(path, name=name) for path, name in zip(paths, names, strict=True)]
