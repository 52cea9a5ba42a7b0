"""Thousands of steps on the tiny model: memory, file handles, shared memory, ledger and controller cost must stay flat.

    python scripts/soak.py [--steps 5000] [--minutes 30] [--folder DIR]

One `headway train` with batches of 4 samples. What every process of the run holds is sampled once a second; a line is
fitted to each after the first fifth. A ledger is history, so it grows: what must be flat is its bytes per sample, and
those of metrics.jsonl per step. The steps or the minutes end it, whichever come first. Prints a table, then one JSON
line; exit 1 when anything grows beyond its bound.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from runs import small_model, train_arguments

SETTINGS = {
    "batch_size": 4,
    "group_size": 2,
    "checkpoint__every": 100,
    "evaluation__every": 1000,
    "evaluation__test_size": 0,
    "optimizer__lr": 1e-5,
    "wait_limit_s": 120.0,
}
WARM_UP = 0.2
"""Of the steps: allocators and caches fill up."""

BOUNDS = {
    "trainer memory": ("MB per 1,000 steps", 2.0),
    "engine memory": ("MB per 1,000 steps", 2.0),
    "trainer file handles": ("per 1,000 steps", 0.5),
    "engine file handles": ("per 1,000 steps", 0.5),
    "shared memory": ("MB per 1,000 steps", 0.01),
    "ledger": ("% more bytes a sample", 10.0),
    "metrics": ("% more bytes a step", 10.0),
    "controller": ("% more CPU a step", 25.0),
    "trainer": ("% more CPU a step", 25.0),
}
"""What is fitted, in which unit it may grow, and by how much at most."""


def sample(run: Path, process: psutil.Process) -> dict[str, float]:
    """What the run holds now."""
    engines = [child for child in process.children() if "headway.engine.server" in " ".join(child.cmdline())]
    threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    cpu = process.cpu_times()
    files = [path for path in Path("/dev/shm").glob(f"headway-weights-{process.pid}-*/*") if path.is_file()]
    return {
        "step": float((run / "metrics.jsonl").read_bytes().count(b"\n")),
        "trainer memory": process.memory_info().rss / 1e6,
        "engine memory": sum(engine.memory_info().rss for engine in engines) / 1e6,
        "trainer file handles": float(process.num_fds()),
        "engine file handles": float(sum(engine.num_fds() for engine in engines)),
        "shared memory": sum(path.stat().st_size for path in files) / 1e6,
        "ledger": float((run / "ledger.sqlite").stat().st_size),
        "metrics": float((run / "metrics.jsonl").stat().st_size),
        "controller": threads[process.pid],
        "trainer": cpu.user + cpu.system,
    }


def soak(folder: Path, num_steps: int, limit_s: float) -> list[dict[str, float]]:
    """Run it, one sample a second; after the limit it is stopped in order."""
    run = folder / "run"
    model = small_model(folder / "model")
    arguments = train_arguments(run, model, num_steps=num_steps, **SETTINGS)
    samples: list[dict[str, float]] = []
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "headway", *arguments]
        # The task is in the tests too.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            time.sleep(1.0)
            if time.monotonic() > deadline:
                process.terminate()
                process.wait()
                break
            try:
                samples.append(sample(run, psutil.Process(process.pid)))
            except (FileNotFoundError, psutil.Error):
                continue  # it is starting, or ending
            if len(samples) % 30 == 0:
                print({name: round(value, 1) for name, value in samples[-1].items()}, file=sys.stderr, flush=True)
    if process.returncode not in (0, 130):
        raise SystemExit(f"the run failed: {(folder / 'log').read_text()[-2000:]}")
    return [sample for sample in samples if sample["engine memory"]]  # starting and ending it has no engine


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """By how much each quantity grows, in the unit of BOUNDS."""
    last = samples[-1]["step"]
    warm = [s for s in samples if WARM_UP * last <= s["step"] < last]
    steps = np.array([s["step"] for s in warm])
    found = {}
    for name, (unit, _) in BOUNDS.items():
        values = np.array([s[name] for s in warm])
        if unit.startswith("%"):
            half = len(warm) // 2
            early, late = (np.polyfit(steps[part], values[part], 1)[0] for part in (slice(half), slice(half, None)))
            found[name] = float(100 * (late / early - 1))
        else:
            found[name] = float(1000 * np.polyfit(steps, values, 1)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="Leave the run here.")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        samples = soak(folder, options.steps, 60 * options.minutes)
    found = growth(samples)
    report(samples, found, time.monotonic() - begun)
    sys.exit(any(found[name] > bound for name, (_, bound) in BOUNDS.items()))


def report(samples: list[dict[str, float]], found: dict[str, float], seconds: float) -> None:
    first = next(s for s in samples if s["step"] >= WARM_UP * samples[-1]["step"])
    table = Table("what", "after warm-up", "at the end", "grows by", "bound", "")
    facts: dict[str, Any] = {"steps": samples[-1]["step"], "seconds": seconds}
    for name, (unit, bound) in BOUNDS.items():
        verdict = "flat" if found[name] <= bound else "GROWS"
        ends = (f"{s[name]:,.1f}" for s in (first, samples[-1]))
        table.add_row(name, *ends, f"{found[name]:.3g} {unit}", f"{bound:g}", verdict)
        facts[name] = {"first": first[name], "last": samples[-1][name], "growth": found[name], "unit": unit}
    Console(width=140).print(table)
    print(json.dumps({"soak": facts}))


if __name__ == "__main__":
    main()
