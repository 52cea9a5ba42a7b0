"""The ledger's audit: it checks the bound, finds tampering, reads beside a run, and says which lengths were lost."""

import io
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ledger_events import add_ready, response, train
from rich.console import Console

from headway.accounts import length_bands, render
from headway.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite", group_size=2, create=True)) as ledger:
        yield ledger


def test_the_bound_is_checked_on_trained_tokens(ledger: Ledger):
    add_ready(ledger, 0)
    ledger.commit_step(0, 3, (0,), token_staleness={3: 4, 2: 2})
    assert ledger.audit(max_staleness=3).ok
    faults = ledger.audit(max_staleness=2).violations
    assert any("step 0 trained tokens of staleness 3; the bound is 2" in fault for fault in faults)
    assert sum("was trained at staleness 3" in fault for fault in faults) == 2


def test_masked_tokens_may_lie_beyond_the_bound(ledger: Ledger):
    add_ready(ledger, 0)
    ledger.commit_step(0, 3, (0,), token_staleness={2: 2}, num_masked={(0, 0): 2, (0, 1): 2})
    assert ledger.audit(max_staleness=2).ok


TAMPERING = {
    "UPDATE samples SET fate = 'ready' WHERE fate = 'generating'": "contradicts its record",
    "UPDATE samples SET fate = 'dropped' WHERE fate = 'generating'": "contradicts its record",
    "UPDATE samples SET fate = 'generating' WHERE fate = 'ready'": "contradicts its record",
    "UPDATE samples SET fate = 'trained' WHERE fate = 'ready'": "contradicts its record",
    "UPDATE samples SET fate = 'dropped', reason = 'x' WHERE fate = 'ready'": "stored for a sample that has none",
    "UPDATE samples SET fate = 'dropped' WHERE fate = 'trained'": "contradicts its record",
    "UPDATE samples SET fate = 'masked' WHERE fate = 'trained'": "contradicts its record",
    "UPDATE samples SET fate = 'nonsense' WHERE fate = 'trained'": "contradicts its record",
    "UPDATE samples SET fate = 'ready', step = NULL, num_masked = NULL WHERE fate = 'trained'": "does not hold what it",
    "UPDATE samples SET num_tokens = num_tokens + 1 WHERE fate = 'ready'": "tokens are not conserved",
    "UPDATE samples SET newest_version = 9, oldest_version = 9 WHERE fate = 'trained'": "newer than the version",
    "UPDATE samples SET step = 1 WHERE group_id = 0": "not trained with its group",
    "UPDATE groups SET step = NULL WHERE group_id = 0": "not trained with its group",
    "UPDATE counters SET value = value + 1 WHERE name = 'samples_issued'": "samples are not conserved",
    "UPDATE steps SET token_staleness = '{\"0\": 1}' WHERE step = 0": "staleness histogram",
    "UPDATE steps SET policy_version = 9 WHERE step = 0": "older version than the step before",
    "DELETE FROM samples WHERE group_id = 1 AND member = 0": "does not have all of its members",
    "DELETE FROM samples WHERE group_id = 1": "does not have all of its members",
    "DELETE FROM groups WHERE group_id = 1": "group id was skipped",
    "DELETE FROM groups WHERE group_id = 0": "not group 0",
    "DELETE FROM steps WHERE step = 0": "skipped or never committed",
    "DELETE FROM steps WHERE step = 1": "skipped or never committed",
    "DELETE FROM payloads WHERE group_id = 2": "ready response is not stored",
    "DELETE FROM payloads WHERE group_id = 0": "no checkpoint covers",
    "DELETE FROM discards": "tokens are not conserved",
}


@pytest.mark.parametrize("statement", TAMPERING)
def test_tampering_is_found_by_the_audit(ledger: Ledger, tmp_path: Path, statement: str):
    for group_id in range(3):
        add_ready(ledger, group_id)
    ledger.issue(3, 0)
    ledger.discard(3, 0, 7, "engine died")
    train(ledger, 0, 0)
    train(ledger, 1, 1)
    assert ledger.audit().ok
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        assert db.execute(statement).rowcount > 0
    faults = ledger.audit().violations
    assert any(TAMPERING[statement] in fault for fault in faults), faults


def test_training_a_sample_twice_behind_the_ledgers_back_is_found(ledger: Ledger, tmp_path: Path):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE samples SET fate = 'ready', step = NULL, num_masked = NULL")
        db.execute("UPDATE groups SET step = NULL")
    train(ledger, 1, 0)
    assert any("trained twice" in fault for fault in ledger.audit().violations)


def test_another_process_reads_while_the_run_writes(ledger: Ledger, tmp_path: Path):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    ledger.issue(1, 0)  # leaves a transaction open
    code = (
        "import json, sys; from pathlib import Path; from headway.accounts import audit_file\n"
        "print(json.dumps(audit_file(Path(sys.argv[1])).to_dict()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ledger.sqlite")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    facts = json.loads(out)
    assert facts["ok"] and facts["samples"]["trained"] == 2 and facts["samples_in_flight"] == 0
    ledger.finish(1, 0, response())
    assert ledger.audit().samples["ready"] == 1


def test_length_bands_keep_equal_lengths_together_and_count_what_was_trained():
    assert length_bands([]) == []
    [band] = length_bands([(5, 40, 30)])
    assert (band.shortest, band.longest, band.offered, band.trained) == (5, 5, 40, 30)
    bands = length_bands([(n, 1, int(n <= 15)) for n in range(1, 21)])
    assert [(b.shortest, b.longest, b.offered) for b in bands] == [(2 * k + 1, 2 * k + 2, 2) for k in range(10)]
    assert [b.trained for b in bands] == [2] * 7 + [1, 0, 0]


def test_long_samples_that_are_dropped_show_in_the_length_report(ledger: Ledger):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    add_ready(ledger, 1, versions=(0,) * 50)
    ledger.drop(1, "too stale")
    ledger.issue(2, 0)
    ledger.discard(2, 0, 80, "time limit")
    ledger.drop(2, "time limit")
    report = ledger.audit()
    assert [(b.longest, b.offered, b.trained) for b in report.lengths] == [(3, 2, 2), (50, 2, 0), (80, 1, 0)]
    assert report.num_unknown_lengths == 1


def test_the_audit_renders_and_is_plain_json(ledger: Ledger):
    add_ready(ledger, 0)
    train(ledger, 0, 0)
    add_ready(ledger, 1)
    ledger.drop(1, "too stale")
    report = ledger.audit()
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    console = Console(file=io.StringIO(), width=100)
    console.print(render(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "The accounts add up" in text and "too stale" in text
