"""The planner against published tables of verl's fully asynchronous trainer.

    python scripts/validate_published.py [--rows 7b-64:64 …]

Source: the experiments section of verl/experimental/fully_async_policy/README.md (repository verl-project/verl). Times
are seconds per step of 512 prompts, mean over the run. What goes in is the synchronous row and the settings; what is
predicted is the asynchronous step. Nothing is tuned to the asynchronous rows.

Taken from the table: GPUs, generation and update seconds of the synchronous run, batch, group size, limit, split.
Taken from data sheets: H20 memory bandwidth 4.0 TB/s, 148 TFLOPS (bf16); parameters and cache bytes of the models.
Assumed: 60 % of those peaks; log-normal lengths with cv 1, correlation 0.5 inside a group; GPUs per engine; 256 slots.
Solved from the synchronous row: the mean length, as the one with which generation takes what the table says.

Two predictions, because the table itself shows that halving the trainer's GPUs did not double its time:
  linear    update seconds scale with 1/GPUs from the synchronous row (what one knows before the run)
  measured  update seconds of the asynchronous row are given, so that only the overlap is predicted
staleness_threshold 0.5 with 4 updates of 128 prompts between syncs allows 1.5·512 prompts in flight: here that is a
batch of 128 prompts and max_staleness 5 (capacity 6·128). verl publishes every 4 updates, this model after each.
"""

import argparse
import json
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from headway.planner.costs import EngineCosts, LearnerCosts, SyncCosts
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

BANDWIDTH, FLOPS, EFFICIENCY = 4.0e12, 148e12, 0.6


@dataclass(frozen=True)
class Model:
    """Bytes and work of one forward pass."""

    weight_bytes: float
    active_params: float
    cache_bytes_per_token: float
    gpus_per_engine: int

    def costs(self) -> EngineCosts:
        bandwidth = BANDWIDTH * EFFICIENCY * self.gpus_per_engine
        flops = FLOPS * EFFICIENCY * self.gpus_per_engine
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
    """Update, and reference log-probs where there are any; the asynchronous runs compute no old log-probs."""
    async_step: float
    async_update: float


ROWS = {
    "7b-16:16": Row(DENSE_7B, 28_672, 16, 16, 790.10, 357.41, 313.81, 294.77, 269.80),
    "7b-32:32": Row(DENSE_7B, 28_672, 32, 32, 365.28, 150.72, 133.41, 189.26, 156.98),
    "7b-64:64": Row(DENSE_7B, 28_672, 64, 64, 356.30, 177.85, 113.81, 150.63, 113.16),
    "30b-96:32": Row(MOE_30B, 8_192, 96, 32, 497.89, 348.05, 20.86 + 86.27, 282.75, 50.05 + 206.63),
    "7b-8:8": Row(DENSE_7B, 10_240, 8, 8, 484.62, 52.94, 430.26, 489.95, 435.87),
}


def generation(row: Row, mean: float, *, groups: int = 512) -> Setup:
    """The synchronous row: all GPUs generate, then all train (here: in no time)."""
    gpus = row.engines_gpus + row.learner_gpus
    return Setup(
        groups_per_step=groups,
        group_size=16,
        max_staleness=0,
        lengths=LogNormal(mean, 1.0, row.limit),
        engine=row.model.costs(),
        learner=LearnerCosts(token_s=0.0),
        num_engines=gpus // row.model.gpus_per_engine,
        num_slots=256,
        prompt_tokens=200,
    )


def solve_mean(row: Row) -> float:
    """The mean length with which synchronous generation takes as long as published; the limit where none does."""
    low, high = 50.0, float(row.limit)
    for _ in range(9):
        middle = (low * high) ** 0.5
        seconds = simulate(generation(row, middle), num_steps=3, warmup=1).step_s
        low, high = (middle, high) if seconds < row.sync_generate else (low, middle)
    return (low * high) ** 0.5


def predict(row: Row, mean: float, update_s: float) -> float:
    """Seconds of an asynchronous step of 512 prompts whose updates take `update_s` in all."""
    base = generation(row, mean, groups=128)
    setup = replace(
        base,
        max_staleness=5,
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
    table = Table("row", "mean length", "published", "linear", "error", "update measured", "error ")
    facts = []
    for name in options.rows:
        row = ROWS[name]
        mean = solve_mean(row)
        linear_s = row.sync_update * (row.engines_gpus + row.learner_gpus) / row.learner_gpus
        published = row.sync_step / row.async_step
        linear, measured = (row.sync_step / predict(row, mean, s) for s in (linear_s, row.async_update))
        errors = [found / published - 1 for found in (linear, measured)]
        cells = (f"{linear:.2f}×", f"{errors[0]:+.0%}", f"{measured:.2f}×", f"{errors[1]:+.0%}")
        table.add_row(name, f"{mean:,.0f}", f"{published:.2f}×", *cells)
        facts.append({"row": name, "mean": mean, "published": published, "linear": linear, "measured": measured})
    Console(width=110).print(table)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
