"""What each source of π_prox costs, on the same run: `python scripts/bench_proximal.py [--sizes 0.4m 3m 135m]`.

Each row is a real run of the command line with the same seed on the default task. At 0.4m and 3m costs are medians over
`--steps` steps, the first two left out. At 135m it is one step on answers one version old, by a model with the shape of
SmolLM2-135M and random weights: its cost does not depend on what it says. `--model DIR --questions FILE` adds the same
for a real model (`scripts/get_smollm2.py` makes one) on GSM8K-format questions. Prints a table, then one JSON line.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_engine import build
from rich import box
from rich.console import Console
from rich.table import Table

from headway.models.loading import save_causal_lm
from headway.models.tiny import character_tokenizer
from headway.report.jsonl import read_records

SOURCES = ("train_start", "behavior", "loglinear", "ewma", "exact_snapshot", "exact_model", "exact_interrupt")

ONE_STEP = {
    "num_steps": 2,
    "max_staleness": 1,
    "batch_size": 4,
    "group_size": 2,
    "sampling.max_response_tokens": 24,
    "optimizer.lr": 1e-6,
    "wait_limit_s": 600,
}
"""Both batches are sampled by version 0, so the second is one version behind: the step that counts."""

COLUMNS = {
    "step_s": "s/step",
    "extra_s": "extra s/step",
    "host_mb": "host MB",
    "shards": "shards",
    "switch_ms": "switch ms",
    "overlap": "overlap",
    "stall_s": "stall s",
}


def run(folder: Path, source: str, sets: dict[str, Any]) -> list[dict[str, Any]]:
    """The step records of one run."""
    settings = {"algorithm": "decoupled_masked", "proximal": source, "evaluation.every": 0, "evaluation.test_size": 0}
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in (settings | sets).items()]
    command = [sys.executable, "-m", "headway", "train", f"--run={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stdout}{done.stderr}")
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]


def costs(steps: list[dict[str, Any]], skip: int) -> dict[str, float]:
    """Medians in the paper's terms. Extra seconds are all that the learner's step waits for, scoring and keeping."""

    def median(*names: str) -> float:
        return statistics.median(sum(step.get(name, 0.0) for name in names) for step in steps[skip:])

    shards = median("proximal_shards")
    return {
        "step_s": median("step_s"),
        "extra_s": median("proximal_s", "proximal_keep_s", "boundary_s"),
        "host_mb": max(step.get("proximal_bytes", 0.0) for step in steps) / 1e6,
        "shards": shards,
        "switch_ms": 1000 * median("proximal_read_s") / max(1.0, shards),
        "overlap": median("proximal_overlap"),
        "stall_s": median("generation_stall_s"),
        "staleness": median("staleness_token_mean"),
    }


def case(name: str, sets: dict[str, Any], skip: int, table: Table) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for source in SOURCES:
            row = found[source] = costs(run(Path(scratch) / source, source, sets), skip)
            print(f"{name}, {source}: {row['step_s']:.2f} s/step", file=sys.stderr, flush=True)
            shutil.rmtree(Path(scratch) / source)  # a checkpoint at 135M takes 1.6 GB
            table.add_row(name, source, *(_number(row[column]) for column in COLUMNS))
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def empty_table() -> Table:
    """A column for every cost, and 80 characters hold it."""
    table = Table("model", box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("source", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    return table


def random_model(folder: Path) -> Path:
    """The shape of SmolLM2-135M over the character tokenizer."""
    torch.manual_seed(0)
    return save_causal_lm(build("135M"), character_tokenizer(), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["0.4m", "3m", "135m"], choices=["0.4m", "3m", "135m"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--model", type=Path, help="a model folder, for one step at its size")
    parser.add_argument("--questions", type=Path, help="GSM8K-format JSONL for --model")
    options = parser.parse_args()
    table = empty_table()
    results = {}
    for size in options.sizes:
        if size == "135m":
            with tempfile.TemporaryDirectory() as folder:
                model = random_model(Path(folder) / "model")
                results[size] = case(size, ONE_STEP | {"model.path": str(model)}, skip=1, table=table)
        else:
            sets = {"model.path": f"tiny:{size}", "num_steps": options.steps, "max_staleness": options.staleness}
            results[size] = case(size, sets, skip=min(2, options.steps - 1), table=table)
    if options.model:
        task = {"task.name": "gsm8k", "task.options.path": str(options.questions.resolve())}
        sets = ONE_STEP | task | {"model.path": str(options.model.resolve())}
        results[options.model.name] = case(options.model.name, sets, skip=1, table=table)
    Console().print(table)
    print(json.dumps({"bench": "proximal", "steps": options.steps, "results": results}))


if __name__ == "__main__":
    main()
