"""What a killed run must still do, read from its ledger."""

import sqlite3
from dataclasses import dataclass

import msgspec

from headway import wire
from headway.ledger_file import LedgerError
from headway.types import Response


@dataclass(frozen=True, slots=True)
class RedoStep:
    """A step that was committed but that no checkpoint holds: train it again, from the very same responses.

    Example: `RedoStep(step=7, policy_version=7, group_ids=(3, 5), responses=((r0, r1), (r2, r3)))`
    """

    step: int
    policy_version: int
    group_ids: tuple[int, ...]
    responses: tuple[tuple[Response, ...], ...]
    """One tuple of members for each group id."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where a killed run stands.

    Example: `Recovery(next_group_id=9, redo=[], ready={7: (r0, r1)}, partial={8: {1: r2}})`
    """

    next_group_id: int
    """The cursor: the first group that was never issued."""
    redo: list[RedoStep]
    """Steps after the checkpoint, in order."""
    ready: dict[int, tuple[Response, ...]]
    """Whole groups that wait to be trained."""
    partial: dict[int, dict[int, Response]]
    """Issued groups with members still to generate, and the members they already have (perhaps none)."""


def recover(db: sqlite3.Connection, checkpoint_step: int, *, group_size: int) -> Recovery:
    """See `Ledger.recover`."""
    last, _ = last_step(db)
    if checkpoint_step > last:
        raise LedgerError(f"the checkpoint holds step {checkpoint_step}, but the ledger ends at step {last}")
    steps = db.execute("SELECT step, policy_version FROM steps WHERE step > ? ORDER BY step", (checkpoint_step,))
    redo = [_redo(db, step, policy_version, group_size) for step, policy_version in steps.fetchall()]
    ready, partial = _waiting(db)
    return Recovery(next_group_id(db), redo, ready, partial)


def next_group_id(db: sqlite3.Connection) -> int:
    return db.execute("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups").fetchone()[0]


def last_step(db: sqlite3.Connection) -> tuple[int, int]:
    """(step, policy_version) of the newest step; (−1, −1) before the first."""
    return db.execute("SELECT step, policy_version FROM steps ORDER BY step DESC LIMIT 1").fetchone() or (-1, -1)


def _redo(db: sqlite3.Connection, step: int, policy_version: int, group_size: int) -> RedoStep:
    rows = db.execute("SELECT group_id FROM groups WHERE step = ? ORDER BY position", (step,))
    group_ids = tuple(group_id for (group_id,) in rows)
    groups = [_responses(db, group_id) for group_id in group_ids]
    for group_id, members in zip(group_ids, groups, strict=True):
        if len(members) != group_size:
            raise LedgerError(
                f"step {step} must be trained again, but responses of its group {group_id} are gone:"
                " the checkpoint is older than the ledger allows"
            )
    return RedoStep(step, policy_version, group_ids, tuple(tuple(members.values()) for members in groups))


def _waiting(db: sqlite3.Connection) -> tuple[dict[int, tuple[Response, ...]], dict[int, dict[int, Response]]]:
    """Groups in flight: whole ones, and those with members still generating."""
    ready: dict[int, tuple[Response, ...]] = {}
    partial: dict[int, dict[int, Response]] = {}
    groups = db.execute(
        "SELECT group_id, SUM(fate = 'generating'), SUM(fate = 'ready') FROM samples"
        " WHERE fate IN ('generating', 'ready') GROUP BY group_id ORDER BY group_id"
    )
    for group_id, num_generating, num_ready in groups.fetchall():
        members = _responses(db, group_id)
        if len(members) != num_ready:
            raise LedgerError(f"group {group_id} has {num_ready} responses ready, but {len(members)} are stored")
        if num_generating:
            partial[group_id] = members
        else:
            ready[group_id] = tuple(members.values())
    return ready, partial


def _responses(db: sqlite3.Connection, group_id: int) -> dict[int, Response]:
    rows = db.execute("SELECT member, response FROM payloads WHERE group_id = ? ORDER BY member", (group_id,))
    try:
        return {member: wire.decode(data, Response) for member, data in rows}
    except msgspec.MsgspecError as error:
        raise LedgerError(f"a stored response of group {group_id} is damaged: {error}") from error
