"""Do the two factors of r = r_d · r_s mean what they say? Forced discrepancy and staleness, every source on one run.

    python scripts/entanglement.py [--rounding int8] [--steps 30] [--plot out.png]
    python scripts/entanglement.py --train --seeds 0 1 2 [--steps 240]

The first form trains one recorded run whose engines serve rounded weights, retrains it from the record (same bits),
and takes π_prox of every source for the very same batches. The truth is known there: the exact log-probs separate what
rounding did (log π_v/μ) from what training did (log πθ/π_v). A sound source has r_d follow the first and r_s the
second; an entangled one lets staleness leak into r_d. Note that with `engines.on_update = "keep"` keys and values of
older versions are a discrepancy too; the script recomputes them, so that rounding is the only one.

The second form trains with each source and prints test accuracies. Prints a table, then one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from headway.algorithms.proximal import loglinear_proximal
from headway.proximal.average_source import AverageSource
from headway.proximal.samples import Sample, fill, samples_of
from headway.proximal.scorer import Scorer
from headway.report.jsonl import read_records
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.runtime.wiring import replay_learner
from headway.types import Batch

SOURCES = ("exact", "ewma", "loglinear", "behavior", "train_start")
TRAINED = ("exact_snapshot", "exact_interrupt", "ewma", "loglinear", "behavior", "train_start")

Columns = dict[str, np.ndarray]


def train(folder: Path, sets: Mapping[str, Any]) -> None:
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in sets.items()]
    command = [sys.executable, "-m", "headway", "train", f"--run={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def settings(options: argparse.Namespace, source: str, seed: int) -> dict[str, Any]:
    return {
        "algorithm": "decoupled_ppo",
        "proximal": source,
        "engines.round_weights": options.rounding,
        "engines.on_update": "recompute",
        "max_staleness": options.staleness,
        "num_steps": options.steps,
        "seed": seed,
        "model.path": options.model,
    }


def factors(folder: RunFolder) -> Iterator[tuple[int, Columns]]:
    """Step, and for each of its tokens log μ, log πθ, π_prox of every source, staleness: retrained from the record."""
    _, config = RunFolder.open(folder.path)
    learner = replay_learner(folder, config)
    scorer = Scorer(
        learner.model,
        temperature=config.sampling.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        autocast=torch.float32,
    )
    average = AverageSource(
        scorer, window=float(config.max_staleness), reset_below=config.ewma.reset_below, parameters=learner.weights
    )
    for step in recorded_steps(folder.batches):
        batch = read_batch(folder.batches, step)
        averaged = average.complete(batch)
        live = score_all(scorer, batch)
        yield step, columns(batch, averaged, live)
        learner.accumulate(batch)
        average.after_step(batch, learner.step())


def score_all(scorer: Scorer, batch: Batch) -> list[Sample]:
    """Every token under the parameters that the step starts from."""
    samples = samples_of(batch.groups)
    for sample in samples:
        sample.scores[:] = np.nan
    fill(samples, scorer, None)
    return samples


def columns(batch: Batch, averaged: Batch, live: list[Sample]) -> Columns:
    def gather(name: str, of: Batch) -> np.ndarray:
        return np.concatenate([getattr(r, name)[r.mask] for r in of.responses])

    behavior, versions = gather("behavior_logprobs", batch), gather("versions", batch)
    current = np.concatenate(
        [s.scores[len(s.token_ids) - len(r.mask) :][r.mask] for s, r in zip(live, batch.responses, strict=True)]
    )
    tensors = [torch.from_numpy(array) for array in (current, behavior, versions)]
    return {
        "current": current,
        "behavior_logprobs": behavior,
        "age": batch.policy_version - versions,
        "exact": gather("proximal_logprobs", batch),
        "ewma": gather("proximal_logprobs", averaged),
        "loglinear": loglinear_proximal(tensors[0], tensors[1], tensors[2], batch.policy_version).numpy(),
        "behavior": behavior,
        "train_start": current,
    }


def judge(tokens: Columns) -> dict[str, dict[str, float]]:
    """Of each source: the sizes of its factors, and how far each follows the true discrepancy and the true staleness.

    Correlations are over stale tokens; `leak` is the slope of log r_d on the true log staleness, 0 for a sound source.
    """
    stale = tokens["age"] > 0
    discrepancy = (tokens["exact"] - tokens["behavior_logprobs"])[stale]
    staleness = (tokens["current"] - tokens["exact"])[stale]
    found = {}
    for source in SOURCES:
        log_rd = (tokens[source] - tokens["behavior_logprobs"])[stale]
        log_rs = (tokens["current"] - tokens[source])[stale]
        found[source] = {
            "mean_abs_log_rd": float(np.abs(log_rd).mean()),
            "mean_abs_log_rs": float(np.abs(log_rs).mean()),
            "rd_discrepancy": correlation(log_rd, discrepancy),
            "rd_staleness": correlation(log_rd, staleness),
            "rs_discrepancy": correlation(log_rs, discrepancy),
            "rs_staleness": correlation(log_rs, staleness),
            "leak": slope(log_rd, discrepancy, staleness),
            "outside_band": float((np.abs(log_rd) > np.log(1.01)).mean()),
        }
    return found


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 when either does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else 0.0


def slope(log_rd: np.ndarray, discrepancy: np.ndarray, staleness: np.ndarray) -> float:
    """Coefficient of the true staleness in the least-squares fit log r_d ≈ a·discrepancy + b·staleness."""
    design = np.stack([discrepancy, staleness], 1).astype(np.float64)
    return float(np.linalg.lstsq(design, log_rd.astype(np.float64), rcond=None)[0][1])


def compare(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run"
        quiet = {"record": True, "evaluation.every": 0, "evaluation.test_size": 0}
        train(path, settings(options, "exact_snapshot", options.seeds[0]) | quiet)
        steps = [found for _, found in factors(RunFolder(path))]
    tokens = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    if options.plot:
        draw(tokens, options.plot)
    return judge(tokens)


def draw(tokens: Columns, path: Path) -> None:
    """log r_d of every source against the true staleness, and log r_s against the true discrepancy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(SOURCES), figsize=(3 * len(SOURCES), 6), sharex="row", sharey="row")
    discrepancy, staleness = tokens["exact"] - tokens["behavior_logprobs"], tokens["current"] - tokens["exact"]
    for column, source in enumerate(SOURCES):
        log_rd, log_rs = tokens[source] - tokens["behavior_logprobs"], tokens["current"] - tokens[source]
        axes[0, column].scatter(staleness, log_rd, s=1, alpha=0.3)
        axes[1, column].scatter(discrepancy, log_rs, s=1, alpha=0.3)
        axes[0, column].set(title=source, xlabel="true staleness, nats")
        axes[1, column].set(xlabel="true discrepancy, nats")
    axes[0, 0].set(ylabel="log r_d")
    axes[1, 0].set(ylabel="log r_s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def train_each(options: argparse.Namespace) -> dict[str, Any]:
    """Test accuracy at the end with each source, by seed."""
    found: dict[str, Any] = {}
    for source in TRAINED:
        accuracies = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                train(Path(scratch) / "run", settings(options, source, seed))
                records = list(read_records(Path(scratch) / "run" / "metrics.jsonl"))
            tests = [r["accuracy"] for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
            accuracies.append(tests[-1])
        found[source] = {"accuracy": statistics.mean(accuracies), "lowest": min(accuracies), "highest": max(accuracies)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounding", choices=["none", "bfloat16", "int8"], default="int8")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="tiny:0.4m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--train", action="store_true", help="train with every source instead")
    parser.add_argument("--plot", type=Path, help="write the scatter plots here (needs matplotlib)")
    options = parser.parse_args()
    results = train_each(options) if options.train else compare(options)
    table = Table("source", *next(iter(results.values())))
    for source, row in results.items():
        table.add_row(source, *(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    facts = {"rounding": options.rounding, "staleness": options.staleness, "steps": options.steps}
    print(json.dumps({"entanglement": "train" if options.train else "factors", **facts, "results": results}))


if __name__ == "__main__":
    main()
