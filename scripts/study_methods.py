"""Each method on the default task at several staleness bounds and seeds: the real command line, one run after another.

    python scripts/study_methods.py FOLDER [--methods grpo estr …] [--staleness 0 4 16] [--seeds 0 1 2] [--set k=v]

Data is kept as old as the bound allows (`rollout.max_ready_batches=0`). Finished runs in FOLDER are not run again, so
a stopped study goes on where it was. Prints one row a cell: test accuracy at the end as mean and range over the seeds,
the lowest training reward after the first ten steps (of all, where there are no more), and how many seeds collapsed
(test accuracy under half of the start). Then one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.report.jsonl import read_records

METHODS = ("grpo", "estr", "sat", "sat_gspo", "asympo", "spo")
FIXED = ("rollout.max_ready_batches=0", "evaluation.every=0", "optimizer.schedule=constant")


def run(folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Metrics of one whole run; a half one is resumed."""
    if (folder / "config.toml").is_file():
        refuse_other_settings(folder, settings)
        command = ["resume", str(folder)]
    else:
        command = ["train", f"--run={folder}", *(f"--set={s}" for s in settings)]
    with folder.with_suffix(".log").open("a") as log:
        subprocess.run([sys.executable, "-m", "headway", *command], stdout=log, stderr=log, check=True)
    return list(read_records(folder / "metrics.jsonl"))


def refuse_other_settings(folder: Path, settings: list[str]) -> None:
    """A result counts only under the settings it was made with. Exits naming those that differ."""
    stored, asked = load_config(folder / "config.toml").model_dump(), load_config(None, settings).model_dump()
    differing = [f"{key} = {stored[key]}, not {asked[key]}" for key in asked if stored[key] != asked[key]]
    if differing:
        raise SystemExit(f"{folder} holds a run with other settings ({'; '.join(differing)}); name another folder")


def outcome(records: list[dict[str, Any]]) -> dict[str, float]:
    """What one run came to."""
    tests = [r["accuracy"] for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    rewards = [r["reward"] for r in records if r["kind"] == "step"]
    ages = [r["staleness_token_mean"] for r in records if r["kind"] == "step"]
    return {
        "start": tests[0],
        "end": tests[-1],
        "lowest_reward": min(rewards[10:] or rewards),
        "staleness": statistics.mean(ages[len(ages) // 4 :]),
    }


def summarize(runs: list[dict[str, float]]) -> dict[str, float]:
    """Mean and range over seeds of one cell."""
    ends = [r["end"] for r in runs]
    return {
        "mean": statistics.mean(ends),
        "min": min(ends),
        "max": max(ends),
        "start": statistics.mean(r["start"] for r in runs),
        "lowest_reward": min(r["lowest_reward"] for r in runs),
        "staleness": statistics.mean(r["staleness"] for r in runs),
        "collapsed": sum(r["end"] < r["start"] / 2 for r in runs),
        "seeds": len(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 4, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in options.seeds:  # seeds outermost: a study that is stopped early has every cell once
        for staleness in options.staleness:
            for method in options.methods:
                settings = [*FIXED, f"algorithm={method}", f"max_staleness={staleness}", f"seed={seed}", *options.sets]
                records = run(options.folder / f"{method}-s{staleness}-seed{seed}", settings)
                cells.setdefault((method, staleness), []).append(outcome(records))
                print(
                    f"{method} S={staleness} seed {seed}: {cells[method, staleness][-1]}", file=sys.stderr, flush=True
                )
    results = {f"{method} S={staleness}": summarize(runs) for (method, staleness), runs in sorted(cells.items())}
    table = Table("cell", "start", "end (min–max)", "lowest reward", "mean staleness", "collapsed")
    for name, r in results.items():
        ends = f"{r['mean']:.3f} ({r['min']:.3f}–{r['max']:.3f})"
        table.add_row(
            name,
            f"{r['start']:.3f}",
            ends,
            f"{r['lowest_reward']:.2f}",
            f"{r['staleness']:.1f}",
            f"{r['collapsed']} of {r['seeds']}",
        )
    Console().print(table)
    print(json.dumps({"study": "methods", "sets": options.sets, "results": results}))


if __name__ == "__main__":
    main()
