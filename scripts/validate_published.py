"""The planner against published tables of verl's fully asynchronous trainer.

    python scripts/validate_published.py [--rows 7b-64:64 …]

Source: the experiments section of verl/experimental/fully_async_policy/README.md (repository verl-project/verl). Times
are seconds per step of 512 prompts, mean over the run. What goes in is the synchronous row and the settings; what is
predicted is the asynchronous step. No number of an asynchronous row is used, but for its update time in `measured`.

Taken from the table: GPUs, generation and update seconds of the synchronous run, batch, group size, limit, split.
Taken from data sheets: H20 memory bandwidth 4.0 TB/s, 148 TFLOPS (bf16); parameters and cache bytes of the models.
Assumed: 60 % of those peaks in decoding, 40 % in training; log-normal lengths, correlation 0.5 inside a group; GPUs per
engine; 256 slots.
Solved from the synchronous row: the mean length, from the arithmetic of the update (8 operations a parameter and token:
activations are computed twice), and how much slower than assumed the engine is, from the seconds of generation.

What the synchronous row cannot say is whether generation was long because engines were busy or because they waited for
the longest responses, and that decides what overlap buys. So every prediction is made for two spreads of lengths,
standard deviation ÷ mean of 1 (even) and 4 (a tail up to the limit), and is a range between them.

Two predictions, because the table itself shows that halving the trainer's GPUs did not double its time:
  linear    update seconds scale with 1/GPUs from the synchronous row (what one knows before the run)
  measured  update seconds of the asynchronous row are given, so that only the overlap is predicted
No schedule makes a step shorter than its update, so sync step ÷ async update is the most that `measured` can be.
staleness_threshold 0.5 with 4 updates of 128 prompts between syncs allows 1.5·512 prompts in flight: here that is a
batch of 128 prompts and max_staleness 5 (capacity 6·128). That trainer never waits for a slow sample; the nearest
policy of ours is `mask`, whose batches go as soon as they are full. verl publishes every 4 updates, this model after
each.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from headway.planner.costs import EngineCosts, LearnerCosts, SyncCosts
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

BANDWIDTH, FLOPS, EFFICIENCY, TRAINING_EFFICIENCY = 4.0e12, 148e12, 0.6, 0.4
SPREADS = (1.0, 4.0)
PROMPTS, GROUP, PROMPT_TOKENS = 512, 16, 200


@dataclass(frozen=True)
class Model:
    """Bytes and work of one forward pass."""

    weight_bytes: float
    active_params: float
    cache_bytes_per_token: float
    gpus_per_engine: int

    def costs(self, slowness: float = 1.0) -> EngineCosts:
        bandwidth = BANDWIDTH * EFFICIENCY * self.gpus_per_engine / slowness
        flops = FLOPS * EFFICIENCY * self.gpus_per_engine / slowness
        per_token = 2 * self.active_params / flops
        return EngineCosts(self.weight_bytes / bandwidth, per_token, self.cache_bytes_per_token / bandwidth, per_token)


# Qwen2.5-Math-7B: 28 layers, 4 key-value heads of 128. Qwen3-30B-A3B: 48 layers, 4 heads of 128; a full batch reads all
# experts. Both in bf16.
DENSE_7B = Model(15.2e9, 7.6e9, 2 * 28 * 4 * 128 * 2, 1)
MOE_30B = Model(61e9, 3.3e9, 2 * 48 * 4 * 128 * 2, 4)


@dataclass(frozen=True)
class Row:
    """One comparison of the table, seconds a step."""

    model: Model
    limit: int
    engines_gpus: int
    learner_gpus: int
    sync_step: float
    sync_generate: float
    sync_update: float
    async_step: float
    async_update: float
    sync_reference: float = 0.0
    """Reference log-probs, where there are any; the asynchronous runs compute no old log-probs."""
    async_reference: float = 0.0


ROWS = {
    "7b-16:16": Row(DENSE_7B, 28_672, 16, 16, 790.10, 357.41, 269.80, 294.77, 313.81),
    "7b-32:32": Row(DENSE_7B, 28_672, 32, 32, 365.28, 150.72, 133.41, 189.26, 156.98),
    "7b-64:64": Row(DENSE_7B, 28_672, 64, 64, 356.30, 177.85, 113.81, 150.63, 113.16),
    "30b-96:32": Row(MOE_30B, 8_192, 96, 32, 497.89, 348.05, 86.27, 282.75, 206.63, 20.86, 50.05),
    "7b-8:8": Row(DENSE_7B, 10_240, 8, 8, 484.62, 52.94, 430.26, 489.95, 435.87),
}


@dataclass(frozen=True)
class Workload:
    """What the synchronous row says of lengths and engines."""

    mean: float
    cv: float
    slowness: float
    """Of the engine, against the assumed share of the data sheet's peaks."""


def mean_length(row: Row) -> float:
    """Tokens a response, from the seconds that the synchronous update takes."""
    gpus = row.engines_gpus + row.learner_gpus
    operations = row.sync_update * gpus * FLOPS * TRAINING_EFFICIENCY
    return operations / (8 * row.model.active_params) / (PROMPTS * GROUP) - PROMPT_TOKENS


def generation(row: Row, work: Workload, *, groups: int = PROMPTS) -> Setup:
    """The synchronous row: all GPUs generate, then all train (here: in no time)."""
    gpus = row.engines_gpus + row.learner_gpus
    return Setup(
        groups_per_step=groups,
        group_size=GROUP,
        max_staleness=0,
        lengths=LogNormal(work.mean, work.cv, row.limit),
        engine=row.model.costs(work.slowness),
        learner=LearnerCosts(token_s=0.0),
        num_engines=gpus // row.model.gpus_per_engine,
        num_slots=256,
        prompt_tokens=PROMPT_TOKENS,
    )


def generation_s(row: Row, work: Workload) -> float:
    """Seconds of a synchronous generation."""
    return simulate(generation(row, work), num_steps=3, warmup=1).step_s


def solve(row: Row, cv: float) -> Workload:
    """The engine with which synchronous generation takes as long as published."""
    mean = mean_length(row)
    slowness = bisect(lambda x: generation_s(row, Workload(mean, cv, x)) - row.sync_generate, 0.1, 10.0)
    return Workload(mean, cv, slowness)


def bisect(excess: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function of a positive number crosses 0, within 2 % or so; an end where it does not."""
    for _ in range(8):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low * high) ** 0.5


def predict(row: Row, work: Workload, update_s: float) -> float:
    """Seconds of an asynchronous step of 512 prompts whose updates take `update_s` in all."""
    setup = replace(
        generation(row, work, groups=PROMPTS // 4),
        max_staleness=5,
        over_bound="mask",
        num_engines=row.engines_gpus // row.model.gpus_per_engine,
        learner=LearnerCosts(token_s=0.0, step_s=update_s / 4),
        on_update="interrupt",
        sync=SyncCosts(publish_s=0.1),
    )
    return 4 * simulate(setup, num_steps=24).step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    table = Table("row", "mean length", "slowness", "published", "linear", "error", "measured", "error ", "at most")
    facts = []
    for name in options.rows:
        row = ROWS[name]
        works = [solve(row, cv) for cv in SPREADS]
        linear_s = (row.sync_update + row.sync_reference) * (row.engines_gpus + row.learner_gpus) / row.learner_gpus
        measured_s = row.async_update + row.async_reference
        published, most = row.sync_step / row.async_step, row.sync_step / measured_s
        linear, measured = ([row.sync_step / predict(row, w, s) for w in works] for s in (linear_s, measured_s))
        slowness = " – ".join(f"{work.slowness:.2f}" for work in works)
        cells = [cell for found in (linear, measured) for cell in (_span(found), _error(found, published))]
        table.add_row(name, f"{works[0].mean:,.0f}", slowness, f"{published:.2f}×", *cells, f"{most:.2f}×")
        facts.append({"row": name, "published": published, "linear": linear, "measured": measured, "at_most": most})
    Console(width=120).print(table)
    print(json.dumps(facts))


def _span(found: list[float]) -> str:
    return f"{min(found):.2f} – {max(found):.2f}×"


def _error(found: list[float], published: float) -> str:
    """Of the nearest end; none inside."""
    nearest = min(max(published, min(found)), max(found))
    return "inside" if nearest == published else f"{nearest / published - 1:+.0%}"


if __name__ == "__main__":
    main()
