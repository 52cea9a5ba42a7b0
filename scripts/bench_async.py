"""Asynchronous against synchronous training on the same cores, to the same held-out accuracy.

    python scripts/bench_async.py [--target 0.85] [--seeds 0] [--latency 0.2]

Two cases: the default demo, and the same with a sleeping tool (log-normal, mean `--latency` seconds). Each run is the
real command line; it is stopped when an evaluation reaches the target. Prints a table, then one JSON line.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.accounts import audit_file
from headway.report.jsonl import read_records

LIMIT_S = 900


@dataclass(frozen=True)
class Outcome:
    """One run up to its target."""

    seconds: float | None
    """Since training began, cold start left out; None when the target was not reached."""
    records: list[dict[str, Any]]
    dropped: int


def run(folder: Path, *, seed: int, staleness: int, latency: float, target: float) -> Outcome:
    """Train until validation accuracy reaches `target`."""
    sets = [f"seed={seed}", f"max_staleness={staleness}", f"task.latency_s={latency}"]
    sets += ["evaluation.every=10", "evaluation.test_size=0"]
    command = [sys.executable, "-m", "headway", "train", f"--run={folder}", *(f"--set={s}" for s in sets)]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + LIMIT_S
        reached = None
        while process.poll() is None and reached is None and time.monotonic() < deadline:
            time.sleep(0.2)
            reached = time_to(target, list(read_records(folder / "metrics.jsonl")))
        process.send_signal(signal.SIGTERM)  # SIGINT may be ignored in background jobs
        process.wait()
    records = list(read_records(folder / "metrics.jsonl"))
    dropped = audit_file(folder / "ledger.sqlite").samples["dropped"]
    return Outcome(time_to(target, records), records, dropped)


def time_to(target: float, records: list[dict[str, Any]]) -> float | None:
    """`elapsed_s` of the first evaluation at or above the target."""
    hits = (r["elapsed_s"] for r in records if r["kind"] == "evaluation" and r["accuracy"] >= target)
    return next(hits, None)


def facts(outcomes: list[Outcome]) -> dict[str, Any]:
    """Medians over the runs of one cell; idle shares are means over time."""
    steps = [r for o in outcomes for r in o.records if r["kind"] == "step"]
    timed = [s for s in steps if s["step"] > 0]  # the first step's time holds the start
    ages: Counter[int] = Counter()
    for step in steps:
        ages.update({int(age): n for age, n in step["token_staleness"].items()})
    times = [o.seconds for o in outcomes if o.seconds is not None]
    return {
        "seconds_to_target": statistics.median(times) if len(times) == len(outcomes) else None,
        "steps_per_s": 1 / statistics.median(s["step_s"] for s in steps),
        # Means over time: engines that work in bursts are idle in most steps, whatever the share of all.
        "learner_idle": statistics.fmean((s["learner_idle"] for s in timed), weights=[s["step_s"] for s in timed]),
        "engine_idle": statistics.fmean((s["engine_idle"] for s in timed), weights=[s["step_s"] for s in timed]),
        "staleness": {str(age): round(ages[age] / sum(ages.values()), 3) for age in sorted(ages)},
        "dropped": sum(o.dropped for o in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--latency", type=float, default=0.2)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    table = Table("case", "mode", "s to target", "steps/s", "learner idle", "engine idle", "staleness", "dropped")
    with tempfile.TemporaryDirectory() as scratch:
        for case, latency in (("demo", 0.0), ("tool latency", options.latency)):
            for mode, staleness in (("sync", 0), ("async", 4)):
                outcomes = [
                    run(
                        Path(scratch) / f"{case.replace(' ', '-')}-{mode}-{seed}",
                        seed=seed,
                        staleness=staleness,
                        latency=latency,
                        target=options.target,
                    )
                    for seed in options.seeds
                ]
                found = results.setdefault(case, {})[mode] = facts(outcomes)
                reached = found["seconds_to_target"]
                table.add_row(
                    case,
                    mode,
                    f"{reached:.1f}" if reached else "not reached",
                    f"{found['steps_per_s']:.2f}",
                    f"{found['learner_idle']:.0%}",
                    f"{found['engine_idle']:.0%}",
                    "  ".join(f"{age}: {share:.0%}" for age, share in found["staleness"].items()),
                    str(found["dropped"]),
                )
    for cell in results.values():
        times = cell["sync"]["seconds_to_target"], cell["async"]["seconds_to_target"]
        cell["speed_up"] = times[0] / times[1] if all(times) else None
        cell["speed_up_steps_per_s"] = cell["async"]["steps_per_s"] / cell["sync"]["steps_per_s"]
    Console().print(table)
    print(json.dumps({"bench": "async", "target": options.target, "seeds": options.seeds, "results": results}))


if __name__ == "__main__":
    main()
