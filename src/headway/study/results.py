"""A study's one table, `results.sqlite`: a row a run. It is made from the run folders, which are what counts."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from headway.study.design import Trial
from headway.study.outcome import Ending, Outcome

_MEASURES = tuple(field.name for field in fields(Outcome) if field.name != "curve")
_COLUMNS = ("name", "settings", "state", "reason", "collapsed", *_MEASURES, "curve")


class Results:
    """The table, opened for one write at a time; columns are those of Outcome, `settings` and `curve` are JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        columns = ", ".join(f'"{name}"' + (" TEXT PRIMARY KEY" if name == "name" else "") for name in _COLUMNS)
        with self._open() as connection:
            # Several studies may share a folder, and a version of Headway before this one may have had other columns.
            if [row[1] for row in connection.execute("PRAGMA table_info(runs)")] != list(_COLUMNS):
                connection.execute("DROP TABLE IF EXISTS runs")
                connection.execute(f"CREATE TABLE runs ({columns})")

    def put(self, trial: Trial, ending: Ending, outcome: Outcome | None) -> None:
        """Write a run that ended. `outcome`: None where it failed."""
        values = {} if outcome is None else asdict(outcome) | {"collapsed": outcome.collapsed}
        values["curve"] = json.dumps(values.get("curve", {}))
        values |= {"name": trial.name, "settings": json.dumps(trial.settings), **asdict(ending)}
        marks = ", ".join("?" * len(_COLUMNS))
        with self._open() as connection:
            row = [values.get(name) for name in _COLUMNS]
            connection.execute(f"INSERT OR REPLACE INTO runs VALUES ({marks})", row)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection
