"""The ledger keeps the fate of every sample, refuses what would break an account, and recovers what it holds."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_events import add_ready, response, staleness, train

from headway import wire
from headway.accounts import audit_file
from headway.ledger import Ledger, LedgerError


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite", group_size=2, create=True)) as ledger:
        yield ledger


def test_samples_and_tokens_are_conserved_through_every_fate(ledger: Ledger):
    for group_id in range(4):
        add_ready(ledger, group_id)
    ledger.issue(4, 1)
    ledger.discard(4, 0, 10, "engine died")
    ledger.finish(4, 1, response())
    ledger.issue(5, 1)
    ledger.drop(3, "too stale")
    ages = staleness(1, *[response()] * 4)
    ages[1] -= 2 + 1
    ages[0] -= 1
    ledger.commit_step(0, 1, (1, 0), token_staleness=ages, num_masked={(0, 1): 3, (1, 0): 1})
    report = ledger.audit(max_staleness=1)
    assert report.ok, report.violations
    assert report.samples_issued == 12
    assert report.samples == {"trained": 3, "masked": 1, "dropped": 2, "ready": 3, "generating": 3}
    assert report.tokens_sampled == 9 * 3 + 10
    assert report.tokens == {"trained": 8, "masked": 4, "dropped": 16, "ready": 9, "generating": 0}
    assert {reason: (loss.samples, loss.tokens) for reason, loss in report.losses.items()} == {
        "engine died": (0, 10),
        "too stale": (2, 6),
    }
    assert report.sample_staleness == {1: 3}
    assert report.token_staleness == {0: 3, 1: 5}


def test_recovery_gives_back_redo_ready_and_partial_groups_exactly(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, group_size=2, create=True)
    for group_id in range(4):
        add_ready(ledger, group_id)
    ledger.issue(4, 0)
    ledger.finish(4, 1, response((1, 2, 3)))
    ledger.issue(5, 0)
    ledger.drop(0, "too stale")
    train(ledger, 0, 3)
    train(ledger, 1, 1)
    ledger.close()
    with closing(Ledger(path, group_size=2, create=False)) as again:
        found = again.recover(-1)
        assert [(s.step, s.policy_version, s.group_ids) for s in found.redo] == [(0, 1, (3,)), (1, 2, (1,))]
        assert wire.encode(found.redo[0].responses[0][1]) == wire.encode(response())
        assert found.next_group_id == 6
        assert list(found.ready) == [2] and len(found.ready[2]) == 2
        assert {g: list(members) for g, members in found.partial.items()} == {4: [1], 5: []}
        assert wire.encode(found.partial[4][1]) == wire.encode(response((1, 2, 3)))
        assert [s.step for s in again.recover(0).redo] == [1]
        assert again.recover(1).redo == []


def test_a_batch_is_redone_in_the_order_in_which_it_was_committed(ledger: Ledger):
    for group_id in range(3):
        add_ready(ledger, group_id)
    train(ledger, 0, 2, 0, 1)
    assert ledger.recover(-1).redo[0].group_ids == (2, 0, 1)


def test_pruned_responses_are_gone_and_a_redo_that_needs_them_is_refused(ledger: Ledger):
    for group_id in range(2):
        add_ready(ledger, group_id)
        train(ledger, group_id, group_id)
    ledger.prune(0)
    assert [s.step for s in ledger.recover(0).redo] == [1]
    assert ledger.audit().ok
    with pytest.raises(LedgerError, match="step 0 must be trained again"):
        ledger.recover(-1)


def test_a_checkpoint_newer_than_the_ledger_is_refused(ledger: Ledger):
    with pytest.raises(LedgerError, match="holds step 3, but the ledger ends at step -1"):
        ledger.recover(3)


@pytest.mark.parametrize("group_id", [0, 2])
def test_a_skipped_or_reused_group_id_is_refused(ledger: Ledger, group_id: int):
    ledger.issue(0, 0)
    with pytest.raises(LedgerError, match="the next one is 1"):
        ledger.issue(group_id, 0)


def test_a_sample_finishes_once(ledger: Ledger):
    ledger.issue(0, 0)
    ledger.finish(0, 0, response())
    with pytest.raises(LedgerError, match=r"sample \(0, 0\) finished, but it is ready"):
        ledger.finish(0, 0, response())
    with pytest.raises(LedgerError, match=r"sample \(7, 0\) finished, but it is not issued"):
        ledger.finish(7, 0, response())
    assert ledger.audit().tokens_sampled == 3


def test_a_response_without_sampled_tokens_is_refused(ledger: Ledger):
    ledger.issue(0, 0)
    with pytest.raises(LedgerError, match="no sampled token"):
        ledger.finish(0, 0, response(()))


def test_unissued_samples_can_be_neither_discarded_nor_dropped(ledger: Ledger):
    with pytest.raises(LedgerError, match="never issued"):
        ledger.discard(0, 0, 3, "engine died")
    with pytest.raises(LedgerError, match="never issued"):
        ledger.drop(0, "too stale")


@pytest.mark.parametrize(
    ("step", "version", "group_ids", "ages", "masked", "message"),
    [
        (1, 2, (0,), {1: 6}, {}, "the next one is 0"),
        (0, 0, (0,), {1: 6}, {}, "newer than version 0"),
        (0, 2, (1,), {1: 6}, {}, "is generating"),
        (0, 2, (9,), {1: 6}, {}, "0 of its 2 members exist"),
        (0, 2, (0, 0), {1: 12}, {}, "a group twice"),
        (0, 2, (0,), {1: 5}, {}, "trains 6 tokens, but token_staleness counts 5"),
        (0, 2, (0,), {1: 7, -1: -1}, {}, "from the future"),
        (0, 2, (0,), {1: 6}, {(0, 0): 4}, "4 of its 3 tokens masked"),
        (0, 2, (0,), {1: 6}, {(1, 0): 1}, "outside its batch"),
    ],
)
def test_a_step_that_would_break_an_account_is_refused_and_changes_nothing(
    ledger: Ledger, step, version, group_ids, ages, masked, message
):
    add_ready(ledger, 0)
    ledger.issue(1, 0)
    before = ledger.audit().to_dict()
    with pytest.raises(LedgerError, match=message):
        ledger.commit_step(step, version, group_ids, token_staleness=ages, num_masked=masked)
    assert ledger.audit().to_dict() == before


def test_a_group_is_trained_at_most_once(ledger: Ledger):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    with pytest.raises(LedgerError, match=r"sample \(0, 0\) was to be trained, but it is trained"):
        train(ledger, 1, 0)


def test_what_comes_of_a_full_disk_is_refused_in_the_words_of_the_full_disk(ledger: Ledger, tmp_path: Path):
    add_ready(ledger, 0)
    ledger.flush()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as disk:
        # SQLite takes the whole transaction back where a page cannot be written.
        disk.execute("CREATE TRIGGER full BEFORE INSERT ON steps BEGIN SELECT RAISE(ROLLBACK, 'disk full'); END")
    ledger.issue(1, 0)
    with pytest.raises(LedgerError, match="disk full"):
        train(ledger, 0, 0)
    with pytest.raises(LedgerError, match="disk full"):  # that it was never issued would be no help
        ledger.discard(1, 0, 3, "attempt lost")


def test_dropping_leaves_trained_members_alone(ledger: Ledger):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    ledger.drop(0, "too stale")
    assert ledger.audit().samples["trained"] == 2


def test_opening_refuses_what_is_not_this_ledger(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(LedgerError, match="no ledger at"):
        Ledger(path, group_size=2, create=False)
    with pytest.raises(LedgerError, match="no ledger at"):
        audit_file(path)
    Ledger(path, group_size=2, create=True).close()
    with pytest.raises(LedgerError, match="already is a ledger"):
        Ledger(path, group_size=2, create=True)
    with pytest.raises(LedgerError, match="holds groups of 2, but group_size is 3"):
        Ledger(path, group_size=3, create=False)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = 99 WHERE name = 'schema_version'")
    with pytest.raises(LedgerError, match="schema version 99"):
        Ledger(path, group_size=2, create=False)


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 20)
    for create in (True, False):
        with pytest.raises(LedgerError, match=r"ledger\.sqlite is not a readable ledger"):
            Ledger(path, group_size=2, create=create)


def test_a_damaged_response_is_refused_by_name(ledger: Ledger, tmp_path: Path):
    add_ready(ledger, 0)
    ledger.flush()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE payloads SET response = x'00ff'")
    with pytest.raises(LedgerError, match="response of group 0 is damaged"):
        ledger.recover(-1)


def test_a_step_commits_the_responses_it_was_given_and_a_redo_trains_them(ledger: Ledger):
    add_ready(ledger, 0)
    scored = replace(response(), proximal_logprobs=np.array([0, -1, -2, -3], np.float32))
    ages = staleness(1, response(), response())
    with pytest.raises(LedgerError, match="no stored response"):
        ledger.commit_step(0, 1, [0], token_staleness=ages, responses={(7, 0): scored})
    ledger.store_again({(0, 1): scored})
    ledger.commit_step(0, 1, [0], token_staleness=ages, responses={(0, 0): scored})
    (step,) = ledger.recover(-1).redo
    for found in step.responses[0]:
        assert found.proximal_logprobs is not None and found.proximal_logprobs.tolist() == [0, -1, -2, -3]


class Faulty:
    """A connection on which `fault` is raised once, in place of the n-th statement that starts with `word`."""

    def __init__(self, db: sqlite3.Connection, word: str, n: int, fault: BaseException) -> None:
        self._db, self._word, self._left, self._fault = db, word, n, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
        self._count(statement)
        return self._db.execute(statement, *args)

    def executemany(self, statement: str, *args: Any) -> sqlite3.Cursor:
        self._count(statement)
        return self._db.executemany(statement, *args)

    def _count(self, statement: str) -> None:
        self._left -= statement.startswith(self._word)
        if self._left == 0:
            self._left = -1
            raise self._fault


@pytest.mark.parametrize("fault", [TimeoutError("held"), MemoryError(), sqlite3.OperationalError("disk full")])
@pytest.mark.parametrize(
    ("word", "n"), [("INSERT INTO samples", 2), ("INSERT INTO payloads", 2), ("UPDATE counters", 1), ("COMMIT", 1)]
)
def test_no_half_of_an_event_is_ever_kept_whatever_is_raised_in_its_middle(
    tmp_path: Path, word: str, n: int, fault: BaseException, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, group_size=2, create=True)
    add_ready(ledger, 0)
    ledger.flush()
    monkeypatch.setattr(ledger, "_db", Faulty(ledger._db, word, n, fault))
    monkeypatch.setattr("headway.ledger.MAX_BUFFERED_S", -1 if word == "COMMIT" else 60)
    with pytest.raises((type(fault), LedgerError)):
        ledger.issue(1, 0)
        ledger.finish(1, 0, response())
        ledger.finish(1, 1, response())
        ledger.issue(2, 0)
        ledger.flush()
    with pytest.raises((type(fault), LedgerError)):  # the first complaint, again
        ledger.issue(1, 0)
    ledger.close()
    audit_file(path).require()
    with closing(Ledger(path, group_size=2, create=False)) as again:
        assert again.recover(-1).next_group_id == 1  # the whole transaction was lost
        again.issue(1, 0)
        assert again.audit().ok
