"""The planner against real runs of this machine: learn costs from some, predict the others.

    python scripts/validate_planner.py make runs/validation --rounds 2  # 14 short runs a round; use an idle machine
    python scripts/validate_planner.py check runs/validation            # learn from four of them, predict the rest
    python scripts/validate_planner.py check runs/validation --learn sync async

`make` trains the grid below, all of it in every round (skipping what is finished): an untrained model of 0.4M
parameters says 40 characters in the mean, 64 at most, and is rewarded for digits. A step takes half a second, so that
engines and learner decide it, as they do in runs worth planning; `--task default` is the default task instead, whose
answers of four tokens leave most of a step to the controller. `check` prints predicted and measured throughput and mean
token staleness of every run that costs were not learned from, means over the rounds, and what staleness would be if
engines took a tenth less or more time, then one JSON line. The target is 10 % on both.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from headway.envs.addition import Addition
from headway.envs.turns import SingleTurn
from headway.models.tiny import build_tiny
from headway.planner.setup import Setup
from headway.runtime.learned_costs import imitate, learn
from headway.runtime.observed import CostsUnknown, Observed, observe
from headway.types import Prompt

COMMON: dict[str, object] = {
    "evaluation.every": 0,
    "evaluation.test_size": 0,
    "checkpoint.every": 100_000,
    "num_steps": 60,
}
LONG: dict[str, object] = {
    "task.name": "validate_planner:Digits",
    "sampling.max_response_tokens": 64,
    "batch_size": 64,
    "engines.num_slots": 32,
    "optimizer.lr": 1e-6,  # lengths are to stay as they are
}
NUM_SIMULATED = 16

TASKS: dict[str, dict[str, object]] = {"long": LONG, "default": {}}

GRID: dict[str, dict[str, object]] = {
    "sync": {"max_staleness": 0},
    "async": {"max_staleness": 4},
    "bound1": {"max_staleness": 1},
    "bound8": {"max_staleness": 8},
    "slots16": {"max_staleness": 4, "engines.num_slots": 16},
    "slots8": {"max_staleness": 4, "engines.num_slots": 8},
    "sync-slots64": {"max_staleness": 0, "engines.num_slots": 64},
    "sync-slots16": {"max_staleness": 0, "engines.num_slots": 16},
    "sync-slots8": {"max_staleness": 0, "engines.num_slots": 8},
    "tool": {"max_staleness": 4, "task.latency_s": 0.3},
    "sync-tool": {"max_staleness": 0, "task.latency_s": 0.3},
    "drop": {"max_staleness": 1, "over_bound": "drop", "task.latency_s": 0.3},
    "two-engines": {"max_staleness": 4, "engines.num_engines": 2},
    "batch128": {"max_staleness": 4, "batch_size": 128},
}


class Digits(Addition):
    """The same prompts; the reward is the share of digits in what is said, so that untrained models have one."""

    def start(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn(lambda text: sum(c.isdigit() for c in text) / max(1, len(text)))


def make(folder: Path, rounds: int, chosen: list[str], task: str) -> None:
    """Train every run that has not ended, round by round, so that a loaded hour falls on all settings."""
    common = COMMON | TASKS[task]
    if task == "long":
        common["model.path"] = str(build_tiny(folder / "model", "0.4m"))
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for name, place in [(name, f"{name}-{i}") for i in range(rounds) for name in chosen]:
        run, settings = folder / place, GRID[name]
        if (run / "checkpoints" / f"version-{COMMON['num_steps']:06d}").is_dir():
            continue
        if (run / "config.toml").is_file():
            command = ["resume", str(run)]
        else:
            # Of every round its own, or the same tools would be slow in each of them.
            seeded = common | settings | {"seed": int(place[-1])}
            sets = [f"--set={key}={json.dumps(value)}" for key, value in seeded.items()]
            command = ["train", f"--run={run}", *sets]
        print(f"{place}: headway {' '.join(command)}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "headway", *command], env=variables, check=True, stdout=subprocess.DEVNULL
        )


def rounds_of(folder: Path, name: str) -> list[Observed]:
    """Every round of a setting that has steps enough."""
    found = []
    for path in sorted(folder.glob(f"{name}-[0-9]")):
        try:
            found.append(observe(path))
        except CostsUnknown as error:
            print(f"left out: {error}")
    return found


def forecast(setup: Setup, run: Observed) -> tuple[float, float]:
    """Samples/s and mean token staleness: means over simulations, which differ in how slow which tool is."""
    found = [imitate(setup, run, seed=seed) for seed in range(NUM_SIMULATED)]
    return fmean(f.samples_per_s for f in found), fmean(f.staleness_token_mean for f in found)


def check(folder: Path, learn_from: list[str]) -> None:
    """Print predictions beside measurements, each the mean over its rounds."""
    runs = {name: rounds_of(folder, name) for name in GRID}
    learned = [run for name in learn_from for run in runs[name]]
    table = Table(
        "run", "rounds", "samples/s", "predicted", "error", "staleness", "predicted ", "error ", "engines ±10 %"
    )
    rows = []
    for name in [name for name in GRID if runs[name] and name not in learn_from]:
        setup = learn(learned, config=runs[name][0].config)
        predicted_rate, predicted_age = forecast(setup, runs[name][0])
        doubted = (replace(setup, engine=setup.engine.times(x)) for x in (0.9, 1.1))
        ages = sorted(forecast(doubt, runs[name][0])[1] for doubt in doubted)
        rate = fmean(run.samples_per_s for run in runs[name])
        age = fmean(run.staleness_token_mean for run in runs[name])
        rate_error = predicted_rate / rate - 1
        age_error = predicted_age / age - 1 if age else 0.0
        rows.append({"run": name, "rate_error": rate_error, "staleness_error": age_error, "staleness_range": ages})
        table.add_row(
            name,
            str(len(runs[name])),
            f"{rate:.1f}",
            f"{predicted_rate:.1f}",
            f"{rate_error:+.1%}",
            f"{age:.2f}",
            f"{predicted_age:.2f}",
            f"{age_error:+.1%}",
            f"{ages[0]:.2f}–{ages[1]:.2f}",
        )
    Console(width=120).print(table)
    print(json.dumps({"learned_from": learn_from, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--learn",
        nargs="+",
        default=["sync", "sync-slots16", "sync-slots8", "async"],
        help="names of the runs to learn from",
    )
    parser.add_argument("--task", choices=TASKS, default="long", help="with make: what is trained, see above")
    parser.add_argument("--rounds", type=int, default=1, help="with make: how often every setting is trained")
    parser.add_argument("--runs", nargs="+", choices=GRID, default=list(GRID), help="with make: only these")
    options = parser.parse_args()
    if options.action == "make":
        make(options.folder, options.rounds, options.runs, options.task)
    else:
        check(options.folder, options.learn)


if __name__ == "__main__":
    main()
