"""What each source of π_prox costs, on the same run: `python scripts/bench_proximal.py [--sizes 0.4m 3m 135m]`.

Each row is a real run of the command line with the same seed on the default task. Costs are medians over its steps but
the first `--staleness` + 1, whose data is fresher, and the last `--staleness`, at whose end less and less is under way.
At 135m that is three steps on answers at most one version old, by a model with the shape of SmolLM2-135M and random
weights: its cost does not depend on what it says. `--model DIR --questions FILE` adds the same for a real model
(`scripts/get_smollm2.py` makes one) on GSM8K-format questions. Prints a table, then one JSON line; a dash stands for
what a source does not have or nobody measures.
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

SETTINGS = {
    "algorithm": "decoupled_masked",
    "rollout.max_ready_batches": 0,  # data as old as the bound allows, however fast a source is
    "evaluation.every": 0,
    "evaluation.test_size": 0,
}

FEW_STEPS = {
    "num_steps": 6,
    "max_staleness": 1,
    "batch_size": 4,
    "group_size": 2,
    "sampling.max_response_tokens": 24,
    "optimizer.lr": 1e-6,
    "wait_limit_s": 600,
}
"""Batches are at most one version behind, and tokens are under way at every boundary but the last."""

COLUMNS = {
    "step_s": "s/step",
    "extra_s": "extra s",
    "keep_s": "keep s",
    "host_mb": "host MB",
    "shards": "shards",
    "switch_ms": "switch ms",
    "gain_s": "gain s",
    "stall_s": "stall s",
}

EXTRA = ("proximal_s", "proximal_keep_s", "boundary_wait_s", "boundary_s")
"""All that the learner's step does or waits for because of the source: scoring, keeping, and the boundary."""


def run(folder: Path, source: str, sets: dict[str, Any]) -> list[dict[str, Any]]:
    """The step records of one run."""
    settings = SETTINGS | {"proximal": source} | sets
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headway", "train", f"--run={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stdout}{done.stderr}")
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]


def costs(steps: list[dict[str, Any]], staleness: int) -> dict[str, float | None]:
    """Medians in the paper's terms; None where the source has no such cost or it is not measured.

    `keep_s` is the part of `extra_s` that writes parameters or averages them. `switch_ms`: to map one old version;
    its pages are read later, by the pass. `gain_s`: the worker's seconds that the learner did not wait for.
    """
    steady = steps[staleness + 1 : len(steps) - staleness]

    def median(*names: str) -> float | None:
        found = [sum(step.get(name, 0.0) for name in names) for step in steady if names[0] in step]
        return statistics.median(found) if found else None

    reads = [1000 * s["proximal_read_s"] / max(1, s["proximal_shards"]) for s in steady if "proximal_read_s" in s]
    gains = [s["proximal_worker_s"] - s["proximal_s"] for s in steady if "proximal_worker_s" in s]
    return {
        "step_s": median("step_s"),
        "extra_s": median(*EXTRA) or 0.0,
        "keep_s": median("proximal_keep_s"),
        "boundary_wait_s": median("boundary_wait_s"),
        "boundary_s": median("boundary_s"),
        "host_mb": max(step.get("proximal_bytes", 0.0) for step in steps) / 1e6,
        "shards": median("proximal_shards"),
        "switch_ms": statistics.median(reads) if reads else None,
        "worker_s": median("proximal_worker_s"),
        "gain_s": statistics.median(gains) if gains else None,
        "stall_s": median("generation_stall_s"),
        "staleness": median("staleness_token_mean"),
    }


def case(name: str, sets: dict[str, Any], table: Table) -> dict[str, dict[str, float | None]]:
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for source in SOURCES:
            row = found[source] = costs(run(Path(scratch) / source, source, sets), sets["max_staleness"])
            print(f"{name}, {source}: {row['step_s']:.2f} s/step", file=sys.stderr, flush=True)
            shutil.rmtree(Path(scratch) / source)  # a checkpoint at 135M takes 1.6 GB
            table.add_row(name, source, *(_number(row[column]) for column in COLUMNS))
    return found


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def empty_table() -> Table:
    """A column for every cost, and 80 characters hold it."""
    table = Table("model", box=box.SIMPLE, padding=0, pad_edge=False)
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
    parser.add_argument("--steps", type=int, default=16, help="of a run at 0.4m and 3m")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--model", type=Path, help="a model folder, measured as 135m is")
    parser.add_argument("--questions", type=Path, help="GSM8K-format JSONL for --model")
    options = parser.parse_args()
    if options.steps <= 2 * options.staleness + 1:
        parser.error(f"--steps {options.steps} leaves none between the first --staleness + 1 and the last --staleness")
    table = empty_table()
    results = {}
    for size in options.sizes:
        if size == "135m":
            with tempfile.TemporaryDirectory() as folder:
                model = random_model(Path(folder) / "model")
                results[size] = case(size, FEW_STEPS | {"model.path": str(model)}, table)
        else:
            sets = {"model.path": f"tiny:{size}", "num_steps": options.steps, "max_staleness": options.staleness}
            results[size] = case(size, sets, table)
    if options.model:
        task = {"task.name": "gsm8k", "task.options.path": str(options.questions.resolve())}
        sets = FEW_STEPS | task | {"model.path": str(options.model.resolve())}
        results[options.model.name] = case(options.model.name, sets, table)
    Console().print(table)
    print(json.dumps({"bench": "proximal", "steps": options.steps, "results": results}))


if __name__ == "__main__":
    main()
