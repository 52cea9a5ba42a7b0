"""What each source of π_prox costs, on the same run: `python scripts/bench_proximal.py [--sizes 0.4m 3m] [--steps 12]`.

Each row is a real run of the command line with the same seed, one-digit addition by default; costs are medians over
its steps, the first two left out. `--model DIR --questions FILE` adds one step at that size on GSM8K-format questions.
Prints a table, then one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.report.jsonl import read_records

SOURCES = ("train_start", "behavior", "loglinear", "ewma", "exact_snapshot", "exact_model", "exact_interrupt")

COLUMNS = {
    "step_s": "s/step",
    "extra_s": "extra s/step",
    "host_mb": "host MB",
    "shards": "version shards",
    "switch_ms": "switch ms",
    "overlap": "overlap",
    "stall_s": "generation stall s",
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
            table.add_row(name, source, *(f"{row[column]:.3g}" for column in COLUMNS))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["0.4m", "3m"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--model", type=Path, help="a model folder, for one step at its size")
    parser.add_argument("--questions", type=Path, help="GSM8K-format JSONL for --model")
    options = parser.parse_args()
    table = Table("model", "source", *COLUMNS.values())
    results = {}
    for size in options.sizes:
        sets = {"model.path": f"tiny:{size}", "num_steps": options.steps, "max_staleness": options.staleness}
        results[size] = case(size, sets, skip=min(2, options.steps - 1), table=table)
    if options.model:
        # Three versions and a few short answers: enough for a batch that is one version behind.
        sets = {
            "model.path": str(options.model.resolve()),
            "task.name": "gsm8k",
            "task.options.path": str(options.questions.resolve()),
            "num_steps": 3,
            "max_staleness": 2,
            "batch_size": 4,
            "group_size": 2,
            "sampling.max_response_tokens": 24,
            "optimizer.lr": 1e-6,
            "wait_limit_s": 600,
        }
        results[options.model.name] = case(options.model.name, sets, skip=2, table=table)
    Console().print(table)
    print(json.dumps({"bench": "proximal", "steps": options.steps, "results": results}))


if __name__ == "__main__":
    main()
