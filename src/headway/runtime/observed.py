"""What run folders show of costs and lengths, for the planner to learn from."""

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from headway import ledger_file
from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.report.jsonl import read_records
from headway.runtime.run_folder import RunFolder

SKIPPED_STEPS = 3
"""First steps of a run, in which caches and pipelines fill."""

STOOD_STILL = 5.0
"""A step in which the learner was at work this many times longer than in the median one says something of the machine,
not of what things cost. What it waited for is no such sign: tools have long tails."""


_NEWEST = ("num_refills", "num_started")
"""Metrics that runs of older versions lack."""


class CostsUnknown(HeadwayError, ValueError):
    """Nobody said what things cost; the message says who could."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one run showed, step by step in its steady state."""

    config: RunConfig
    steps: list[dict[str, Any]]
    lengths: np.ndarray
    """Sampled tokens `[groups, members]`."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return fmean(s["step_s"] for s in self.steps)

    @property
    def samples_per_s(self) -> float:
        return self.config.batch_size / self.step_s

    @property
    def staleness_token_mean(self) -> float:
        return sum(s["staleness_token_mean"] * s["num_tokens"] for s in self.steps) / sum(
            s["num_tokens"] for s in self.steps
        )

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens trained."""
        return fmean(s["num_tokens"] for s in self.steps) / self.step_s


def observe(path: Path) -> Observed:
    """Read a run. The first 3 + 2·S steps are left out. Raises CostsUnknown when too few remain."""
    folder, config = RunFolder.open(path)
    first = first_observed(config)
    every = [r for r in read_records(folder.metrics_path) if r["kind"] == "step"]
    last = end_observed(config)
    steps = _undisturbed([r for r in every if first <= r["step"] < last and not r.get("redone")])
    if len(steps) < 4:
        raise CostsUnknown(
            f"{path} has {len(steps)} steps between the first {first} and the last {config.max_staleness + 1}, too few "
            "to learn from; train longer"
        )
    if lacking := [name for name in _NEWEST if any(name not in r for r in steps)]:
        raise CostsUnknown(
            f"{path}: its metrics lack {', '.join(lacking)}, so it was made by an older version; train it again"
        )
    if not any(r["mean_active"] for r in steps):
        raise CostsUnknown(
            f"{path}: no metric says how many sequences its engines decoded together; with engine = "
            f'"{config.engine}" give --costs FILE instead of --run'
        )
    return Observed(config, steps, _lengths(folder.ledger_path))


def first_observed(config: RunConfig) -> int:
    """The first step that costs are learned from."""
    return SKIPPED_STEPS + 2 * config.max_staleness


def end_observed(config: RunConfig) -> int:
    """The step before which they end: the last S + 1 train what is left while nothing is issued any more."""
    return config.num_steps - config.max_staleness - 1


def _undisturbed(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps in which the machine stood still: `STOOD_STILL` times as long at work as the median step."""
    limit = STOOD_STILL * median(map(_busy_s, steps)) if steps else 0.0
    return [s for s in steps if _busy_s(s) <= limit]


def _busy_s(step: dict[str, Any]) -> float:
    """Seconds for which the learner did not wait."""
    return (1 - step["learner_idle"]) * step["step_s"]


def _lengths(path: Path) -> np.ndarray:
    """Sampled tokens of every whole group, trained or not."""
    groups: dict[int, list[int]] = defaultdict(list)
    with closing(ledger_file.open_existing(path, read_only=True)) as db:
        size = ledger_file.meta(db, "group_size")
        for group_id, tokens in db.execute("SELECT group_id, num_tokens FROM samples WHERE num_tokens IS NOT NULL"):
            groups[group_id].append(tokens)
    whole = [lengths for lengths in groups.values() if len(lengths) == size]
    if not whole:
        raise CostsUnknown(f"{path} holds no whole group yet; let the run take a few steps")
    return np.array(whole, np.int64)
