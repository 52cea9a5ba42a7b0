"""Costs and lengths as run folders show them. The arithmetic of the fits is the planner's; here is only reading.

A run with `max_staleness = 0` shows what engine and learner cost alone, an asynchronous one what they cost each other;
with several runs both are learned, with one run the costs are as they were in it.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from headway import ledger_file
from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts, ToolCosts, fit_line
from headway.planner.lengths import Empirical
from headway.planner.setup import Setup
from headway.planner.simulate import simulate
from headway.report.jsonl import read_records
from headway.runtime.run_folder import RunFolder

SKIPPED_STEPS = 3
"""First steps of a run, in which caches and pipelines fill."""


STOOD_STILL = 5.0
"""A step this many times longer than the median one says something of the machine, not of what things cost."""


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


def observe(path: Path, *, skip: int | None = None) -> Observed:
    """Read a run. The first `skip` steps are left out (default 3 + 2·S). Raises CostsUnknown when too few remain."""
    folder, config = RunFolder.open(path)
    skip = SKIPPED_STEPS + 2 * config.max_staleness if skip is None else skip
    every = [r for r in read_records(folder.metrics_path) if r["kind"] == "step"]
    # The last S + 1 steps train what is left while nothing is issued any more.
    last = config.num_steps - config.max_staleness - 1
    steps = _undisturbed([r for r in every if skip <= r["step"] < last and not r.get("redone")])
    if len(steps) < 4:
        raise CostsUnknown(
            f"{path} has {len(steps)} steps between the first {skip} and the last {config.max_staleness + 1}, too few "
            "to learn from; train longer"
        )
    if not all("mean_active" in r for r in steps):
        raise CostsUnknown(f"{path}: its metrics lack mean_active, so it was made by an older version; train it again")
    return Observed(config, steps, _lengths(folder.ledger_path))


def _undisturbed(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps in which the machine stood still: over `STOOD_STILL` times the median step."""
    limit = STOOD_STILL * median(s["step_s"] for s in steps) if steps else 0.0
    return [s for s in steps if s["step_s"] <= limit]


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


def learn(runs: Sequence[Observed], *, config: RunConfig) -> Setup:
    """The setup of `config` with costs and lengths of these runs, which should differ from it in few things."""
    alone = [run for run in runs if run.config.max_staleness == 0] or list(runs)
    together = [run for run in runs if run.config.max_staleness > 0]
    engine, learner = _engine(alone), _learner(alone)
    steps = [s for run in runs for s in run.steps]
    num_members = runs[0].lengths.shape[1]
    setup = Setup(
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        over_bound=config.over_bound,
        max_ready_batches=config.rollout.max_ready_batches or None,
        lengths=Empirical(np.concatenate([run.lengths for run in runs if run.lengths.shape[1] == num_members])),
        engine=engine,
        learner=learner,
        num_engines=config.engines.num_engines,
        num_slots=config.engines.num_slots,
        learner_devices=config.learner.num_ranks,
        on_update=config.engines.on_update,
        prompt_tokens=round(fmean(_prompt_tokens(run, s) for run in runs for s in run.steps)),
        sync=SyncCosts(publish_s=_publish(alone), transfer_s=_transfer(alone)),
        tool=ToolCosts(num_turns=max(1, round(fmean(s["turns"] for s in steps))), latency_s=config.task.latency_s),
    )
    synchronous = [run for run in alone if run.config.max_staleness == 0 and not run.config.task.latency_s]
    if synchronous:
        setup = replace(setup, shared=SharedCosts(controller_s=fmean(_controller(setup, run) for run in synchronous)))
    if together and alone != list(runs):
        setup = replace(setup, shared=_slowdowns(together, setup))
    if together and config.max_staleness:
        # Engines at work take a version later than idle ones do.
        setup = replace(setup, sync=replace(setup.sync, transfer_s=_transfer(together)))
    return setup


def _engine(runs: Sequence[Observed]) -> EngineCosts:
    """Prefill is part of what a sequence costs here: metrics do not tell the two apart."""
    rows = [_decoding(run, s) for run in runs for s in run.steps if s["mean_active"]]
    active, seconds, weights = zip(*rows, strict=True)
    step_s, sequence_s = fit_line(active, seconds, weights)
    return EngineCosts(step_s=step_s, sequence_s=sequence_s)


def _decoding(run: Observed, step: dict[str, Any]) -> tuple[float, float, float]:
    """(mean active sequences, seconds of a decode step, decode steps) of one record."""
    tokens = step["sampled_tokens_per_s"] * step["step_s"]
    decode_steps = tokens / step["mean_active"]
    busy_s = (1 - step["engine_idle"]) * step["step_s"] * run.config.engines.num_engines
    return step["mean_active"], busy_s / decode_steps, decode_steps


def _learner(runs: Sequence[Observed]) -> LearnerCosts:
    tokens = [_trained(s) / run.config.learner.num_ranks for run in runs for s in run.steps]  # of one device
    seconds = [s["train_s"] for run in runs for s in run.steps]
    if np.std(tokens) < 0.1 * np.mean(tokens):
        # Steps of one size cannot tell a fixed part from one per token; most of it is per token.
        return LearnerCosts(token_s=sum(seconds) / sum(tokens))
    step_s, token_s = fit_line(tokens, seconds, [1.0] * len(tokens))
    return LearnerCosts(step_s=step_s, token_s=token_s)


def _trained(step: dict[str, Any]) -> float:
    """Tokens, prompts included."""
    return step["trained_tokens_per_s"] * step["train_s"]


def _publish(runs: Sequence[Observed]) -> float:
    """What a step takes besides waiting and training: publish, records, the controller's work in between."""
    return max(0.0, fmean((1 - s["learner_idle"]) * s["step_s"] - s["train_s"] for run in runs for s in run.steps))


def _transfer(runs: Sequence[Observed]) -> float:
    return median(s["publish_lag_s"] for run in runs for s in run.steps)


def _prompt_tokens(run: Observed, step: dict[str, Any]) -> float:
    return max(0.0, _trained(step) - step["num_tokens"] - step["num_masked_tokens"]) / run.config.batch_size


def _slowdowns(runs: Sequence[Observed], setup: Setup) -> SharedCosts:
    """How much longer either side takes while the other works.

    A learner that stands still for a share k of its time, and is slowed s-fold for a share o, takes r = 1 / ((1 − k) ·
    (1 − o·(1 − 1/s))) times as long as alone; an engine likewise, with k = 0.
    """
    steps = [(run, s) for run in runs for s in run.steps]
    trained = sum(s["train_s"] for _, s in steps)
    alone = sum(setup.learner.train(_trained(s), run.config.learner.num_ranks) for run, s in steps)
    still = sum(setup.shared.controller_s * run.config.batch_size for run, _ in steps) / sum(
        s["step_s"] for _, s in steps
    )
    learner = _slowdown(trained / alone * (1 - min(still, 0.9)), fmean(1 - s["engine_idle"] for _, s in steps))
    decoded = [_decoding(run, s) for run, s in steps if s["mean_active"]]
    alone = sum(n * setup.engine.decode_step(round(active)) for active, _, n in decoded)
    ratio = sum(n * seconds for _, seconds, n in decoded) / alone
    engine = _slowdown(ratio, trained / sum(s["step_s"] for _, s in steps))
    return replace(setup.shared, engine_slowdown=engine, learner_slowdown=learner)


def _slowdown(ratio: float, overlap: float) -> float:
    """s of ratio = 1 / (1 − overlap · (1 − 1/s)), between 1 and 20: more would be a standstill.

    >>> round(_slowdown(1 / (1 - 0.5 * (1 - 1 / 3)), 0.5), 6), _slowdown(0.9, 0.5), _slowdown(3.0, 0.5)
    (3.0, 1.0, 20.0)
    """
    return 1 / min(1.0, max(0.05, 1 - (1 - 1 / ratio) / max(overlap, 1e-9)))


def _controller(setup: Setup, run: Observed) -> float:
    """Seconds per response that make a simulated synchronous step as long as the run's; 0 when it is so without."""
    own = replace(
        setup.synchronous(),
        num_slots=run.config.engines.num_slots,
        num_engines=run.config.engines.num_engines,
        groups_per_step=run.config.groups_per_step,
        group_size=run.config.group_size,
        learner_devices=run.config.learner.num_ranks,
        tool=replace(setup.tool, latency_s=0.0),
    )

    def excess(cost: float) -> float:
        shared = replace(own.shared, controller_s=cost)
        return simulate(replace(own, shared=shared), num_steps=12, warmup=2).step_s - run.step_s

    low, high = 0.0, run.step_s / run.config.batch_size
    if excess(low) >= 0:
        return 0.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2
