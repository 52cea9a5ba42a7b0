"""The planner against AsyncOPD (2606.24143): 2.70×, 1.66× and 1.94× over strict synchronous distillation.

    python scripts/validate_published_asyncopd.py

Published (paper; example configurations of furiosa-ai/async-opd): students Qwen3 1.7B, 4B and 8B, teacher
Qwen3-30B-A3B on one GPU; eight GPUs, 4 for engines and 3 for the learner with 1.7B, 5 and 2 with 4B; 256 prompts of one
response a step, at most 16,384 new tokens, staleness threshold 4. No time of any run is used.
Not published: devices, mean lengths, and the split with 8B (taken as that of 4B). Every prediction is a range over mean
lengths; devices are taken to be H100 (3.35 TB/s, 989 TFLOPS in bf16).
Assumed as in validate_published.py: 60 % of those peaks in decoding, 40 % in training and scoring, log-normal lengths
with a spread of 1; 8 operations a parameter and token in training (activations computed once more), 2 in scoring.
The synchronous step generates, scores, trains, one after the other on the same GPUs; in the asynchronous one the
teacher bounds the rate, too.
"""

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from headway.planner.costs import EngineCosts, LearnerCosts
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

BANDWIDTH, FLOPS, EFFICIENCY, TRAINING_EFFICIENCY = 3.35e12, 989e12, 0.6, 0.4
PROMPTS, PROMPT_TOKENS, LIMIT, TEACHER_PARAMS = 256, 200, 16_384, 3.3e9
MEANS = (1_000, 2_000, 4_000, 8_000)


@dataclass(frozen=True)
class Row:
    """A student, its share of the seven GPUs that the teacher leaves, and what was published."""

    num_params: float
    cache_bytes_per_token: float
    num_engines: int
    num_learners: int
    speedup: float


ROWS = {
    "1.7B": Row(1.7e9, 2 * 28 * 8 * 128 * 2, 4, 3, 2.70),
    "4B": Row(4.0e9, 2 * 36 * 8 * 128 * 2, 5, 2, 1.66),
    "8B": Row(8.2e9, 2 * 36 * 8 * 128 * 2, 5, 2, 1.94),
}


def arithmetic_s(operations: float, mean: float, num_gpus: int) -> float:
    """Seconds of so many operations a token over one batch."""
    return operations * PROMPTS * (mean + PROMPT_TOKENS) / (num_gpus * FLOPS * TRAINING_EFFICIENCY)


def setup(row: Row, mean: float, max_staleness: int, learner_s: float) -> Setup:
    bandwidth, flops = BANDWIDTH * EFFICIENCY, FLOPS * EFFICIENCY
    per_token = 2 * row.num_params / flops
    return Setup(
        groups_per_step=PROMPTS,
        group_size=1,
        max_staleness=max_staleness,
        lengths=LogNormal(mean, 1.0, LIMIT),
        engine=EngineCosts(
            2 * row.num_params / bandwidth, per_token, row.cache_bytes_per_token / bandwidth, prefill_s=per_token
        ),
        learner=LearnerCosts(token_s=0.0, step_s=learner_s),
        num_engines=row.num_engines,
        num_slots=512,
        prompt_tokens=PROMPT_TOKENS,
    )


def predict(row: Row, mean: float) -> tuple[float, float]:
    """Seconds of a synchronous and of an asynchronous step."""
    train_s = arithmetic_s(8 * row.num_params, mean, row.num_learners)
    score_s = arithmetic_s(2 * TEACHER_PARAMS, mean, 1)
    together = simulate(setup(row, mean, 0, train_s + score_s), num_steps=20).step_s
    apart = simulate(setup(row, mean, 4, train_s), num_steps=40).step_s
    return together, max(apart, score_s)


def main() -> None:
    table = Table("student", "engines : learner", "published", *(f"mean {mean:,}" for mean in MEANS))
    facts = []
    for name, row in ROWS.items():
        steps = [predict(row, mean) for mean in MEANS]
        found = [together / apart for together, apart in steps]
        cells = [f"{speedup:.2f}× ({speedup / row.speedup - 1:+.0%})" for speedup in found]
        table.add_row(name, f"{row.num_engines}:{row.num_learners}", f"{row.speedup:.2f}×", *cells)
        facts.append({"student": name, "published": row.speedup, "predicted": found, "steps_s": steps})
    Console(width=120).print(table)
    print(json.dumps({"means": MEANS, "rows": facts}))


if __name__ == "__main__":
    main()
