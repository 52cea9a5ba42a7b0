"""The fate of every sample, in SQLite: what was issued, what became of it, and what a killed run must redo.

A sample is (group_id, member). Group ids 0, 1, 2, … are the order of issue and the cursor of the prompt source.

    generating ── finish ──▶ ready ── commit_step ──▶ trained | masked (all of its tokens were)
         └────────── drop ─────┴──▶ dropped

Conservation, in samples and in tokens: issued = trained + masked + dropped + in flight (generating + ready).
Events are counted where they happen (`counters`) and fates where they end (`samples`), so the two can disagree,
and `audit` says where.

A ledger serves one thread. Any number of other processes may read the file meanwhile.
"""

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway import accounts, ledger_file, ledger_recovery, wire
from headway.accounts import Audit
from headway.ledger_file import LedgerError
from headway.ledger_recovery import Recovery, RedoStep, last_step, next_group_id
from headway.types import Response

__all__ = ["Audit", "Ledger", "LedgerError", "Recovery", "RedoStep"]

MAX_BUFFERED_S = 0.05
"""Events younger than this may share one transaction. A kill loses at most the open one, and what it loses
(a response, an issue) is generated again; steps are never buffered."""


class Ledger:
    """Writes and reads one run's ledger file.

    `group_size`: members of every group. `create`: make a new file; otherwise the file must exist.
    Raises LedgerError when it does (or does not) exist, or was written with another schema or group size.
    """

    def __init__(self, path: Path, *, group_size: int, create: bool) -> None:
        self.group_size = group_size
        self._begun = 0.0
        self._counts = Counter[str]()  # what the open transaction adds to `counters`
        self._lost: BaseException | None = None  # why an earlier one could not be written
        self._db = ledger_file.create(path, group_size) if create else ledger_file.open_existing(path)
        stored = ledger_file.meta(self._db, "group_size")
        if stored != group_size:
            self._db.close()
            raise LedgerError(f"{path} holds groups of {stored}, but group_size is {group_size}; set it to {stored}")

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._db.close()

    def flush(self) -> None:
        """Make every event so far survive a kill. Steps and prunings do so by themselves."""
        if self._db.in_transaction:
            with self._transaction(at_once=True):
                pass

    def _commit(self) -> None:
        self._db.executemany(
            "UPDATE counters SET value = value + ? WHERE name = ?", [(n, c) for c, n in self._counts.items()]
        )
        self._counts.clear()
        self._db.execute("COMMIT")

    @contextmanager
    def _transaction(self, *, at_once: bool = False) -> Iterator[sqlite3.Connection]:
        """Joins the open transaction while that one is young. Whoever refuses an event must do so before it writes.

        Raises LedgerError when it cannot be written. After anything but a refusal the whole transaction is lost, for
        half of an event may be in it: end the run and resume it. Later events are refused in the same words: theirs
        would be about what was lost, and be heard instead.
        """
        db = self._db
        with ledger_file.faults(db):
            if self._lost is not None:
                raise self._lost
            if not db.in_transaction:
                db.execute("BEGIN IMMEDIATE")
                self._begun = time.monotonic()
            try:
                yield db
                if at_once or time.monotonic() - self._begun > MAX_BUFFERED_S:
                    self._commit()
            except LedgerError:
                raise
            except BaseException as error:
                self._lost = error
                if db.in_transaction:  # a full disk makes SQLite roll everything back by itself
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _event(self, *, at_once: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction with all of one event or nothing of it, also where it is refused when half of it is written."""
        with self._transaction(at_once=at_once) as db:
            db.execute("SAVEPOINT event")
            try:
                yield db
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK TO event")
                raise
            finally:
                if db.in_transaction:
                    db.execute("RELEASE event")

    def issue(self, group_id: int, policy_version: int) -> None:
        """All members of the next group start generating. Raises LedgerError when a group id is skipped or reused."""
        with self._transaction() as db:
            expected = next_group_id(db)
            if group_id != expected:
                raise LedgerError(f"group {group_id} was issued, but the next one is {expected}: no prompt is skipped")
            db.execute("INSERT INTO groups (group_id, issued_version) VALUES (?, ?)", (group_id, policy_version))
            members = [(group_id, member) for member in range(self.group_size)]
            db.executemany("INSERT INTO samples (group_id, member) VALUES (?, ?)", members)
            self._counts["samples_issued"] += self.group_size

    def finish(self, group_id: int, member: int, response: Response) -> None:
        """Store the response of a generating sample. Raises LedgerError in any other state, or without tokens."""
        num_tokens = response.num_sampled
        if not num_tokens:
            raise LedgerError(f"sample {(group_id, member)}: its response holds no sampled token; drop the group")
        facts = (num_tokens, response.oldest_version, response.newest_version, response.reward)
        payload = wire.encode(response)
        # Two statements: in each the interpreter is given away, and beside a learner it takes its time to come back.
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE samples SET fate = 'ready', num_tokens = ?, oldest_version = ?, newest_version = ?, reward = ?"
                " WHERE group_id = ? AND member = ? AND fate = 'generating'",
                (*facts, group_id, member),
            ).rowcount
            if not changed:
                raise LedgerError(f"sample {(group_id, member)} finished, but it is {_fate(db, group_id, member)}")
            db.execute("INSERT INTO payloads VALUES (?, ?, ?)", (group_id, member, payload))
            self._counts["tokens_sampled"] += num_tokens

    def discard(self, group_id: int, member: int, num_tokens: int, reason: str) -> None:
        """Count tokens of an attempt that came to nothing as dropped; the sample itself keeps its state."""
        if num_tokens < 0:
            raise LedgerError(f"sample {(group_id, member)}: cannot discard {num_tokens} tokens")
        with self._transaction() as db:
            known = db.execute(
                "INSERT INTO discards SELECT group_id, member, ?, ? FROM samples WHERE group_id = ? AND member = ?",
                (num_tokens, reason, group_id, member),
            ).rowcount
            if not known:
                raise LedgerError(f"tokens of sample {(group_id, member)} discarded, but it was never issued")
            self._counts["tokens_sampled"] += num_tokens

    def drop(self, group_id: int, reason: str) -> None:
        """Give up the members that have no final fate yet. Raises LedgerError for a group that was never issued."""
        with self._event() as db:
            if not db.execute("SELECT 1 FROM groups WHERE group_id = ?", (group_id,)).fetchone():
                raise LedgerError(f"group {group_id} dropped, but it was never issued")
            db.execute(
                "DELETE FROM payloads WHERE group_id = ?1 AND member IN"
                " (SELECT member FROM samples WHERE group_id = ?1 AND fate = 'ready')",
                (group_id,),
            )
            db.execute(
                "UPDATE samples SET fate = 'dropped', reason = ?"
                " WHERE group_id = ? AND fate IN ('generating', 'ready')",
                (reason, group_id),
            )

    def commit_step(
        self,
        step: int,
        policy_version: int,
        group_ids: Sequence[int],
        *,
        token_staleness: Mapping[int, int],
        num_masked: Mapping[tuple[int, int], int] | None = None,
        responses: Mapping[tuple[int, int], Response] | None = None,
    ) -> None:
        """Write ahead, in one transaction, that `step` (0, 1, 2, …) consumes these groups; then train them.

        `token_staleness`: policy_version − token version to number of unmasked sampled tokens.
        `num_masked`: masked tokens of each sample (group_id, member); absent means none.
        `responses`: what to store in place of these samples' responses, so that a redo trains the very same.
        A sample becomes `masked` when all of its tokens are, else `trained`.
        Raises LedgerError, and changes nothing, when the step is not the next, a sample is not ready or was
        trained before, a token is newer than `policy_version`, or the token counts disagree.
        """
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"step {step} holds a group twice: {sorted(group_ids)}")
        with self._event(at_once=True) as db:
            _check_step(db, step, policy_version)
            samples = [s for g in group_ids for s in _ready_members(db, g, policy_version, self.group_size)]
            fates = _fates(step, samples, num_masked or {})
            num_tokens = sum(n for _, _, n in samples)
            num_hidden = sum(hidden for _, _, hidden, _, _ in fates)
            _check_token_staleness(step, token_staleness, num_tokens - num_hidden)
            places = [(step, place, group_id) for place, group_id in enumerate(group_ids)]
            db.executemany("UPDATE groups SET step = ?, position = ? WHERE group_id = ?", places)
            db.executemany(
                "UPDATE samples SET fate = ?, step = ?, num_masked = ? WHERE group_id = ? AND member = ?", fates
            )
            histogram = json.dumps({int(age): int(n) for age, n in sorted(token_staleness.items())})
            _store_again(db, responses or {})
            record = (step, policy_version, len(samples), num_tokens, num_hidden, histogram)
            db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", record)

    def store_again(self, responses: Mapping[tuple[int, int], Response]) -> None:
        """Replace stored responses, durably. Raises LedgerError for a sample that has none."""
        if responses:
            with self._event(at_once=True) as db:
                _store_again(db, responses)

    def prune(self, step: int) -> None:
        """Forget the responses of steps up to `step`: a durable checkpoint holds what they taught."""
        with self._event(at_once=True) as db:
            db.execute("DELETE FROM payloads WHERE group_id IN (SELECT group_id FROM groups WHERE step <= ?)", (step,))
            db.execute("UPDATE meta SET value = MAX(value, ?) WHERE name = 'pruned_step'", (step,))

    def recover(self, checkpoint_step: int) -> Recovery:
        """What is left to do for a run whose checkpoint holds steps up to `checkpoint_step` (−1: none).

        Raises LedgerError when the ledger lacks a step of the checkpoint, or a response that is needed again.
        """
        self.flush()
        with ledger_file.faults(self._db, *ledger_file.DAMAGE):
            return ledger_recovery.recover(self._db, checkpoint_step, group_size=self.group_size)

    def audit(self, *, max_staleness: int | None = None) -> Audit:
        """Prove the accounts, or list what is wrong with them."""
        self.flush()
        return accounts.audit(self._db, max_staleness=max_staleness)


def _store_again(db: sqlite3.Connection, responses: Mapping[tuple[int, int], Response]) -> None:
    for sample, response in responses.items():
        changed = db.execute(
            "UPDATE payloads SET response = ? WHERE group_id = ? AND member = ?", (wire.encode(response), *sample)
        ).rowcount
        if not changed:
            raise LedgerError(f"sample {sample} has no stored response to replace")


def _fate(db: sqlite3.Connection, group_id: int, member: int) -> str:
    row = db.execute("SELECT fate FROM samples WHERE group_id = ? AND member = ?", (group_id, member)).fetchone()
    return row[0] if row else "not issued"


def _check_step(db: sqlite3.Connection, step: int, policy_version: int) -> None:
    last, last_version = last_step(db)
    if step != last + 1:
        raise LedgerError(f"step {step} was committed, but the next one is {last + 1}")
    if policy_version < last_version:
        raise LedgerError(f"step {step} trains version {policy_version}, but step {last} trained {last_version}")


def _ready_members(
    db: sqlite3.Connection, group_id: int, policy_version: int, group_size: int
) -> list[tuple[int, int, int]]:
    """(group_id, member, num_tokens) of each member. Raises LedgerError unless all of them may be trained."""
    rows = db.execute(
        "SELECT member, num_tokens, fate, newest_version FROM samples WHERE group_id = ? ORDER BY member", (group_id,)
    ).fetchall()
    if len(rows) != group_size:
        raise LedgerError(f"group {group_id} was to be trained, but {len(rows)} of its {group_size} members exist")
    for member, _, fate, newest in rows:
        if fate != "ready":
            raise LedgerError(f"sample {(group_id, member)} was to be trained, but it is {fate}")
        if newest > policy_version:
            raise LedgerError(
                f"sample {(group_id, member)} holds tokens of version {newest}, newer than version {policy_version}"
                " which is to be trained"
            )
    return [(group_id, member, num_tokens) for member, num_tokens, _, _ in rows]


def _fates(
    step: int, samples: list[tuple[int, int, int]], num_masked: Mapping[tuple[int, int], int]
) -> list[tuple[str, int, int, int, int]]:
    """(fate, step, num_masked, group_id, member) of each sample."""
    strangers = set(num_masked) - {(group_id, member) for group_id, member, _ in samples}
    if strangers:
        raise LedgerError(f"step {step} masks tokens of samples outside its batch: {sorted(strangers)}")
    fates = []
    for group_id, member, num_tokens in samples:
        hidden = num_masked.get((group_id, member), 0)
        if not 0 <= hidden <= num_tokens:
            raise LedgerError(f"sample {(group_id, member)}: {hidden} of its {num_tokens} tokens masked")
        fates.append(("masked" if hidden == num_tokens else "trained", step, hidden, group_id, member))
    return fates


def _check_token_staleness(step: int, token_staleness: Mapping[int, int], num_tokens: int) -> None:
    if min(token_staleness, default=0) < 0:
        raise LedgerError(f"step {step} has tokens of staleness {min(token_staleness)}, from the future")
    if sum(token_staleness.values()) != num_tokens:
        raise LedgerError(
            f"step {step} trains {num_tokens} tokens, but token_staleness counts {sum(token_staleness.values())}"
        )
