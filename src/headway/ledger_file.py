"""The ledger's file: its tables, opening it, and what is wrong with it."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headway.errors import HeadwayError

SCHEMA_VERSION = 1

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    issued_version INTEGER NOT NULL,
    step INTEGER,      -- the step that consumed it
    position INTEGER   -- its place in that step's batch
);
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE samples (
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    fate TEXT NOT NULL DEFAULT 'generating',
    num_tokens INTEGER,   -- sampled tokens of the response
    num_masked INTEGER,   -- of these, how many the step masked
    oldest_version INTEGER,
    newest_version INTEGER,
    reward REAL,
    step INTEGER,
    reason TEXT,          -- why it was dropped
    PRIMARY KEY (group_id, member)
) WITHOUT ROWID;
CREATE TABLE payloads (
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    response BLOB NOT NULL,
    PRIMARY KEY (group_id, member)
) WITHOUT ROWID;
CREATE TABLE discards (
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    reason TEXT NOT NULL
);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,   -- sampled tokens of its samples, masked ones included
    num_masked INTEGER NOT NULL,
    token_staleness TEXT NOT NULL  -- JSON: staleness to number of unmasked tokens
);
INSERT INTO counters VALUES ('samples_issued', 0), ('tokens_sampled', 0);
INSERT INTO meta VALUES ('schema_version', {schema_version}), ('group_size', {group_size}), ('pruned_step', -1);
COMMIT;
"""


class LedgerError(HeadwayError, RuntimeError):
    """The ledger refuses: the event would break an account, or the file is not what the run needs."""


def create(path: Path, group_size: int) -> sqlite3.Connection:
    """A new ledger, empty. Raises LedgerError when there is one already."""
    if group_size < 1:
        raise LedgerError(f"group_size must be at least 1, not {group_size}")
    db = _connect(path, "rwc")
    # A file without tables is one whose maker was killed at once: nothing is lost by making it again.
    if _has_tables(db):
        db.close()
        raise LedgerError(f"{path} already is a ledger: resume that run, or choose another run folder")
    with faults(db):
        db.executescript(_SCHEMA.format(schema_version=SCHEMA_VERSION, group_size=int(group_size)))
    return db


def open_existing(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The ledger at `path`. Raises LedgerError when there is none, or one of another schema version."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: name the folder of a run that has started")
    db = _connect(path, "ro" if read_only else "rw")
    with faults(db):
        version = meta(db, "schema_version") if _has_tables(db) else None
    if version != SCHEMA_VERSION:
        db.close()
        raise LedgerError(f"{path} has ledger schema version {version}; this Headway reads version {SCHEMA_VERSION}")
    return db


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
        _has_tables(db)  # the first statement is what reads the file
        if mode != "ro":
            db.execute("PRAGMA journal_mode = WAL")
            # A kill of the process loses nothing that was committed; only a power cut may lose the last commits.
            db.execute("PRAGMA synchronous = NORMAL")
    except DAMAGED_FILE as error:
        raise LedgerError(f"{path} is not a readable ledger: {error}") from error
    return db


DAMAGED_FILE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises of a file that is damaged, the second where the damage is in the words of its own complaint."""

DAMAGE = (TypeError, ValueError, KeyError, OverflowError)
"""What reading raises where any value may stand under any type, as in a damaged file."""


@contextmanager
def faults(db: sqlite3.Connection, *signs: type[Exception]) -> Iterator[None]:
    """What SQLite says of a full disk or a damaged file becomes a LedgerError that names the file and the mend.

    `signs`: other exceptions that mean damage here.
    """
    try:
        yield
    except (*DAMAGED_FILE, *signs) as error:
        if isinstance(error, sqlite3.OperationalError):
            mend = "if the disk is full, make room; `headway resume` continues the run"
        else:
            mend = "the file is damaged: restore it from a copy, or start a new run from the newest checkpoint"
        path = db.execute("PRAGMA database_list").fetchone()[2]
        raise LedgerError(f"{path}: {type(error).__name__}: {error}; {mend}") from error


def histogram(text: str) -> dict[int, int]:
    """A step's `token_staleness`. Raises ValueError or TypeError when it is damaged."""
    counts = json.loads(text)
    if not isinstance(counts, dict):
        raise ValueError(f"a staleness histogram reads {text!r}")
    return {int(age): int(num) for age, num in counts.items()}


def exists(path: Path) -> bool:
    """Whether a ledger was made here; a file whose maker was killed before its tables stood holds nothing."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with closing(_connect(path, "ro")) as db:
        return _has_tables(db)


def _has_tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None


def meta(db: sqlite3.Connection, name: str) -> int:
    """One of `schema_version`, `group_size`, `pruned_step`."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise LedgerError(f"the ledger is damaged: its meta table lacks {name}")
    return row[0]
