"""metrics.jsonl: one JSON object a line, appended as it happens."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError


class JsonlSink:
    """Appends records; each line reaches the file before `log` returns.

    `resume_at`: forget step records of this step and later ones; they are trained, and logged, again. What was paid for
    them is kept: a redone step takes the `step_s` of the record it replaces.
    """

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self._paid = _keep(path, resume_at) if path.exists() else dict[int, float]()
        self._file = path.open("a", buffering=1)

    def log(self, record: Mapping[str, Any]) -> None:
        if record.get("redone") and (step_s := self._paid.get(record["step"])) is not None:
            record = {**record, "step_s": step_s}
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """All whole records, in order; a line that a kill cut short is left out. Raises HeadwayError naming a bad line."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield _record(line, f"{path}, line {number},")


def _record(line: bytes, name: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HeadwayError(f"{name} is not JSON: {error}; delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise HeadwayError(f"{name} is no record with a kind; delete that line")
    if record["kind"] == "step" and not isinstance(record.get("step"), int):
        raise HeadwayError(f"{name} is a step without its number; delete that line")
    return record


def _keep(path: Path, resume_at: int) -> dict[int, float]:
    """Drop step records from `resume_at` on; returns the `step_s` of each."""
    records = list(read_records(path))
    kept = [r for r in records if r["kind"] != "step" or r["step"] < resume_at]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(partial, path)
    return {r["step"]: r["step_s"] for r in records if r["kind"] == "step" and r["step"] >= resume_at and "step_s" in r}
