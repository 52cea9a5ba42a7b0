"""The planner against the end-to-end table of AReaL (2505.24298): 2.77× and 2.27× over its own synchronous system.

    python scripts/validate_published_areal.py [--rows 1.5B …]

Published (blog/AReaL_v0_3.md, table 2, and blog/AReaL_v0_2.md of inclusionAI/AReaL): nodes, steps, hours of the
synchronous and of the asynchronous run; 512 prompts of 16 responses, at most 27,648 new tokens, fewer than 5 % of them
truncated; weights loaded in flight with the cache computed again. Nothing of the asynchronous rows is used.
Data sheets: 8 H800 a node, 3.35 TB/s and 989 TFLOPS (bf16) each; parameters and cache bytes of Qwen2.5.
Assumed as in validate_published.py: 60 % of those peaks in decoding, 40 % in training, log-normal lengths,
correlation 0.5 inside a group, 256 slots a GPU; 10 operations a parameter and token (activations and proximal log-
probs computed once more); max_staleness 4, the largest that the authors call harmless; minibatches are no steps of
their own.

Not published, so that every prediction is a range over it: the mean length (6,000 and 9,000 tokens; at 9,000 and a
spread of 1, 5 % are truncated) and how GPUs were split (half, two thirds, three quarters for engines). How slow the
engine was follows from the synchronous hours for each length: the step less the arithmetic of the update is
generation.
A "PPO step" is taken as a whole batch. Were it one of the four minibatches, engines would have been as
many times slower than data sheets allow as the column "if minibatches" says.
"""

import argparse
import json
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from validate_published import bisect

from headway.planner.costs import EngineCosts, LearnerCosts, SyncCosts
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

BANDWIDTH, FLOPS, EFFICIENCY, TRAINING_EFFICIENCY, OPERATIONS = 3.35e12, 989e12, 0.6, 0.4, 10
PROMPTS, GROUP, PROMPT_TOKENS, LIMIT = 512, 16, 200, 27_648
MEANS, SHARES = (6_000, 9_000), (1 / 2, 2 / 3, 3 / 4)


@dataclass(frozen=True)
class Row:
    """A model and the hours of 1,000 steps."""

    num_params: float
    cache_bytes_per_token: float
    num_gpus: int
    sync_hours: float
    async_hours: float

    @property
    def sync_step_s(self) -> float:
        return 3.6 * self.sync_hours


ROWS = {
    "1.5B": Row(1.78e9, 2 * 28 * 2 * 128 * 2, 128, 41.0, 14.8),
    "7B": Row(7.6e9, 2 * 28 * 4 * 128 * 2, 192, 57.7, 25.4),
}


def engine(row: Row, slowness: float) -> EngineCosts:
    bandwidth, flops = (peak * EFFICIENCY / slowness for peak in (BANDWIDTH, FLOPS))
    per_token = 2 * row.num_params / flops
    return EngineCosts(2 * row.num_params / bandwidth, per_token, row.cache_bytes_per_token / bandwidth, per_token)


def update_s(row: Row, mean: float, num_gpus: float) -> float:
    """Seconds of one optimizer step, by its arithmetic."""
    tokens = PROMPTS * GROUP * (mean + PROMPT_TOKENS)
    return OPERATIONS * row.num_params * tokens / (num_gpus * FLOPS * TRAINING_EFFICIENCY)


def generation(row: Row, mean: float, slowness: float) -> Setup:
    """Every GPU generates, then all of them train (here: in no time)."""
    return Setup(
        groups_per_step=PROMPTS,
        group_size=GROUP,
        max_staleness=0,
        lengths=LogNormal(mean, 1.0, LIMIT),
        engine=engine(row, slowness),
        learner=LearnerCosts(token_s=0.0),
        num_engines=row.num_gpus,
        num_slots=256,
        prompt_tokens=PROMPT_TOKENS,
    )


def solve(row: Row, mean: float, step_s: float) -> float:
    """How much slower than assumed the engine is, for a synchronous step to take that long."""
    wanted = step_s - update_s(row, mean, row.num_gpus)
    return bisect(lambda x: simulate(generation(row, mean, x), num_steps=3, warmup=1).step_s - wanted, 0.1, 20.0)


def predict(row: Row, mean: float, slowness: float, share: float) -> float:
    """Seconds of an asynchronous step with that share of the GPUs in engines."""
    num_engines = round(share * row.num_gpus)
    setup = replace(
        generation(row, mean, slowness),
        max_staleness=4,
        num_engines=num_engines,
        learner=LearnerCosts(token_s=0.0, step_s=update_s(row, mean, row.num_gpus - num_engines)),
        on_update="interrupt",
        sync=SyncCosts(publish_s=0.1),
    )
    return simulate(setup, num_steps=10).step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    table = Table("model", "mean", "slowness", "if minibatches", *(f"engines {s:.0%}" for s in SHARES), "published")
    facts = []
    for name in options.rows:
        row = ROWS[name]
        published = row.sync_hours / row.async_hours
        for mean in MEANS:
            slowness, unlikely = solve(row, mean, row.sync_step_s), solve(row, mean, 4 * row.sync_step_s)
            found = [row.sync_step_s / predict(row, mean, slowness, share) for share in SHARES]
            cells = [f"{speedup:.2f}× ({speedup / published - 1:+.0%})" for speedup in found]
            table.add_row(name, f"{mean:,}", f"{slowness:.2f}", f"{unlikely:.1f}", *cells, f"{published:.2f}×")
            facts.append(
                {"model": name, "mean": mean, "slowness": slowness, "predicted": found, "published": published}
            )
    Console(width=120).print(table)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
