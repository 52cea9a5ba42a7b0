"""The accounts of a ledger: what was issued and sampled, and what became of it."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headway import ledger_checks, ledger_file

FATES = ("trained", "masked", "dropped", "ready", "generating")

_COUNTED = {"samples": "samples_issued", "tokens": "tokens_sampled"}


@dataclass(frozen=True, slots=True)
class LengthBand:
    """A tenth of the offered samples by length: what the environment cost, against what the learner saw.

    Samples of equal length share a band, so there may be fewer than ten.
    """

    shortest: int
    longest: int
    """Sampled tokens."""
    offered: int
    """Samples with a final fate whose length is known."""
    trained: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What was dropped for one reason."""

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Audit:
    """The accounts of one ledger. `violations` is empty when they add up."""

    num_groups: int
    num_steps: int
    samples_issued: int
    """Counted when issued."""
    tokens_sampled: int
    """Counted when received, whatever became of them."""
    samples: dict[str, int]
    """Fate to number of samples."""
    tokens: dict[str, int]
    """Fate to number of tokens; of a trained sample only the unmasked ones count as trained."""
    losses: dict[str, Loss]
    """By reason; tokens of discarded attempts included."""
    sample_staleness: dict[int, int]
    """Staleness (version trained − oldest sampled token version) to number of trained samples."""
    token_staleness: dict[int, int]
    """Staleness to number of unmasked tokens trained."""
    mean_reward: dict[str, float]
    """Of every fate that has responses."""
    lengths: list[LengthBand]
    num_unknown_lengths: int
    """Samples dropped before any of their tokens came back."""
    violations: list[str]

    @property
    def ok(self) -> bool:
        return not self.violations

    def require(self) -> None:
        """Raises LedgerError with every violation, if there is one."""
        if self.violations:
            raise ledger_file.LedgerError("the ledger does not add up: " + "; ".join(self.violations))

    @property
    def samples_in_flight(self) -> int:
        return self.samples["generating"] + self.samples["ready"]

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of responses that wait to be trained; a response not yet received is not counted."""
        return self.tokens["ready"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        facts = asdict(self)
        for name in ("sample_staleness", "token_staleness"):
            facts[name] = {str(age): n for age, n in facts[name].items()}
        in_flight = {"samples_in_flight": self.samples_in_flight, "tokens_in_flight": self.tokens_in_flight}
        return {"ok": self.ok, **facts, **in_flight}


def audit_file(path: Path, *, max_staleness: int | None = None) -> Audit:
    """The audit of a ledger that another process may be writing. Raises LedgerError when it cannot be read."""
    with closing(ledger_file.open_existing(path, read_only=True)) as db:
        return audit(db, max_staleness=max_staleness)


def audit(db: sqlite3.Connection, *, max_staleness: int | None = None) -> Audit:
    """Recompute every account from the rows. `max_staleness`: also check this bound on all trained tokens.

    Raises LedgerError for a damaged file.
    """
    with ledger_file.faults(db, *ledger_file.DAMAGE):
        db.execute("BEGIN")  # one snapshot, though the run goes on
        try:
            totals = _totals(db)
            conserved = {unit: (totals[issued], totals[unit]) for unit, issued in _COUNTED.items()}
            violations = list(ledger_checks.violations(db, conserved, max_staleness=max_staleness))
            return Audit(**totals, **_histograms(db), violations=violations)
        finally:
            db.execute("ROLLBACK")


def _totals(db: sqlite3.Connection) -> dict[str, Any]:
    counters = dict(db.execute("SELECT name, value FROM counters"))
    samples = dict.fromkeys(FATES, 0)
    tokens = dict.fromkeys(FATES, 0)
    rewards = {}
    for fate, num, num_tokens, num_masked, reward in db.execute(
        "SELECT fate, COUNT(*), TOTAL(num_tokens), TOTAL(num_masked), AVG(reward) FROM samples GROUP BY fate"
    ):
        samples[fate] = num
        tokens[fate] = tokens.get(fate, 0) + int(num_tokens - num_masked)
        tokens["masked"] += int(num_masked)
        if reward is not None:
            rewards[fate] = reward
    discarded = _one(db, "SELECT COALESCE(SUM(num_tokens), 0) FROM discards")
    tokens["dropped"] += discarded
    return {
        "num_groups": _one(db, "SELECT COUNT(*) FROM groups"),
        "num_steps": _one(db, "SELECT COUNT(*) FROM steps"),
        "samples_issued": counters["samples_issued"],
        "tokens_sampled": counters["tokens_sampled"],
        "samples": samples,
        "tokens": tokens,
        "losses": _losses(db),
        "mean_reward": rewards,
    }


def _losses(db: sqlite3.Connection) -> dict[str, Loss]:
    rows = db.execute(
        "SELECT reason, SUM(samples), SUM(tokens) FROM ("
        " SELECT reason, 1 AS samples, COALESCE(num_tokens, 0) AS tokens FROM samples WHERE fate = 'dropped'"
        " UNION ALL SELECT reason, 0, num_tokens FROM discards"
        ") GROUP BY reason ORDER BY reason"
    )
    return {str(reason): Loss(samples, tokens) for reason, samples, tokens in rows}


def _histograms(db: sqlite3.Connection) -> dict[str, Any]:
    token_staleness: Counter[int] = Counter()
    for (text,) in db.execute("SELECT token_staleness FROM steps"):
        token_staleness.update(ledger_file.histogram(text))
    sample_staleness = db.execute(
        "SELECT policy_version - oldest_version AS age, COUNT(*) FROM samples JOIN steps USING (step)"
        " WHERE fate = 'trained' GROUP BY age ORDER BY age"
    )
    lengths = db.execute(
        "SELECT COALESCE(num_tokens, discarded) AS length, COUNT(*), SUM(fate = 'trained')"
        " FROM samples LEFT JOIN (SELECT group_id, member, SUM(num_tokens) AS discarded FROM discards"
        "  GROUP BY group_id, member) USING (group_id, member)"
        " WHERE fate IN ('trained', 'masked', 'dropped') GROUP BY length ORDER BY length"
    ).fetchall()
    return {
        "sample_staleness": dict(sample_staleness.fetchall()),
        "token_staleness": dict(sorted(token_staleness.items())),
        "lengths": length_bands([row for row in lengths if row[0] is not None]),
        "num_unknown_lengths": sum(row[1] for row in lengths if row[0] is None),
    }


def length_bands(rows: list[tuple[int, int, int]]) -> list[LengthBand]:
    """Deciles of offered length from (length, offered, trained) in order of length."""
    total = sum(offered for _, offered, _ in rows)
    bands: dict[int, LengthBand] = {}
    before = 0
    for length, offered, trained in rows:
        decile = 10 * before // total
        band = bands.get(decile, LengthBand(length, length, 0, 0))
        bands[decile] = LengthBand(band.shortest, length, band.offered + offered, band.trained + trained)
        before += offered
    return list(bands.values())


def _one(db: sqlite3.Connection, query: str) -> int:
    return db.execute(query).fetchone()[0]


def render(report: Audit) -> Group:
    """The audit as rich tables."""
    if report.ok:
        verdict = Text("The accounts add up: issued = trained + masked + dropped + in flight.", style="green")
    else:
        verdict = Text("The accounts do not add up:\n" + "\n".join(f"• {v}" for v in report.violations), style="red")
    tables = [_fate_table(report)]
    if report.losses:
        rows = [(reason, loss.samples, loss.tokens) for reason, loss in report.losses.items()]
        tables.append(_table("What was dropped", ("reason", "samples", "tokens"), rows))
    ages = sorted({*report.sample_staleness, *report.token_staleness})
    if ages:
        rows = [(age, report.sample_staleness.get(age, 0), report.token_staleness.get(age, 0)) for age in ages]
        tables.append(_table("Staleness trained", ("versions", "samples (oldest token)", "tokens"), rows))
    if report.lengths:
        rows = [
            (_range(band.shortest, band.longest), band.offered, band.trained, f"{band.trained / band.offered:.1%}")
            for band in report.lengths
        ]
        tables.append(_table("Length offered and trained", ("tokens", "offered", "trained", "share"), rows))
    return Group(*tables, verdict)


def _fate_table(report: Audit) -> Table:
    rows = [
        (fate, report.samples[fate], report.tokens[fate], _reward(report.mean_reward.get(fate)))
        for fate in ("trained", "masked", "dropped")
    ]
    rows.append(("in flight", report.samples_in_flight, report.tokens_in_flight, ""))
    rows.append(("issued", report.samples_issued, report.tokens_sampled, ""))
    title = f"{report.num_groups} groups, {report.num_steps} steps"
    return _table(title, ("fate", "samples", "tokens", "mean reward"), rows)


def _range(low: int, high: int) -> str:
    return f"{low}–{high}" if low != high else str(low)


def _reward(mean: float | None) -> str:
    return "" if mean is None else f"{mean:.3f}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for cell in row))
    return table
