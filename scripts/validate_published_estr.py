"""The planner against ESTR (2607.22186): 82.6 → 214.4 tokens/s and GPU, 2.6× over synchronous GRPO.

    python scripts/validate_published_estr.py

Published: these two rates. They set the unit of time, which no speed-up depends on. No text that could be read gives
model, devices, lengths, tools, bound or split. A speed-up depends on few ratios, so predictions are a range over them:

    training   share of the synchronous step, all devices training: a fifth, two fifths, three fifths
    spread     standard deviation ÷ mean of the lengths, which end at eight times their mean: 0.5, 1, 1.5
    tools      share of an episode that waits for its environment, in four turns: none, half, four fifths

Assumed: eight devices, 16 prompts of 8 responses, correlation 0.5 inside a group; with the batch spread over all
devices a decode step takes twice as long as one of a single sequence, and an engine holds four times as many; bound 4;
the asynchronous run has the best of the seven splits. Compared with *coloc*, where every device generates, then trains,
and with *split*, the same division of devices at bound 0.
"""

import json
from dataclasses import replace
from functools import partial
from itertools import product

from rich.console import Console
from rich.table import Table

from headway.planner.costs import EngineCosts, LearnerCosts, ToolCosts
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

PUBLISHED = 214.4 / 82.6
DEVICES, GROUPS, GROUP, MEAN, BOUND, TURNS = 8, 16, 8, 1000, 4, 4
TRAINING, SPREADS, TOOLS = (0.2, 0.4, 0.6), (0.5, 1.0, 1.5), (0.0, 0.5, 0.8)
SLOTS = GROUPS * GROUP // DEVICES
ENGINE = EngineCosts(step_s=1.0, sequence_s=1.0 / SLOTS)

forecast = partial(simulate, num_steps=16)


def synchronous(spread: float, tools: float) -> Setup:
    """Every device serves both sides in turn; the learner takes no time yet."""
    turn_s = MEAN / TURNS * ENGINE.decode_step(SLOTS)
    return Setup(
        groups_per_step=GROUPS,
        group_size=GROUP,
        max_staleness=0,
        lengths=LogNormal(MEAN, spread, 8 * MEAN, correlation=0.5),
        engine=ENGINE,
        learner=LearnerCosts(token_s=0.0),
        num_engines=DEVICES,
        num_slots=SLOTS,
        learner_devices=DEVICES,
        tool=ToolCosts(num_turns=TURNS, latency_s=turn_s * tools / (1 - tools)),
    )


def predict(training: float, spread: float, tools: float) -> dict[str, float]:
    """Speed-ups of the best split at the bound over *coloc* and over itself at bound 0."""
    together = synchronous(spread, tools)
    generation_s = forecast(together).step_s
    step_s = generation_s / (1 - training)
    learner = LearnerCosts(token_s=training * step_s * DEVICES / (GROUPS * GROUP * MEAN))
    apart = replace(together, max_staleness=BOUND, num_slots=4 * SLOTS, learner=learner)
    steps = {n: forecast(replace(apart, num_engines=n, learner_devices=DEVICES - n)).step_s for n in range(1, DEVICES)}
    best = min(steps, key=lambda n: steps[n])
    split = replace(apart.synchronous(), num_engines=best, learner_devices=DEVICES - best)
    return {
        "training": training,
        "spread": spread,
        "tools": tools,
        "engines": best,
        "coloc": step_s / steps[best],
        "split": forecast(split).step_s / steps[best],
    }


def main() -> None:
    rows = [predict(*ratios) for ratios in product(TRAINING, SPREADS, TOOLS)]
    table = Table("training", "spread", "tools", "engines", "over coloc", "error", "over split", "error ")
    for row in rows:
        cells = [f"{row['training']:.0%}", f"{row['spread']:g}", f"{row['tools']:.0%}", f"{row['engines']:g}"]
        for name in ("coloc", "split"):
            cells += [f"{row[name]:.2f}×", f"{row[name] / PUBLISHED - 1:+.0%}"]
        table.add_row(*cells)
    Console(width=120).print(table)
    print(json.dumps({"published": PUBLISHED, "rows": rows}))


if __name__ == "__main__":
    main()
