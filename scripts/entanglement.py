"""Do the two factors of r = r_d · r_s mean what they say? Forced discrepancy and staleness, every source of π_prox.

    python scripts/entanglement.py [--rounding int8] [--steps 30] [--plot out.png]
    python scripts/entanglement.py --train --out FOLDER --seeds 0 1 2 [--steps 240] [--algorithm decoupled_masked]

The first form trains a recorded run with each exact route, whose engines serve rounded weights, and retrains each from
its record. That gives the parameters θ_v of every version, and with them the truth, from plain `transformers` and no
log-prob that the run stored: what rounding did, log π(θ_v) − log π(rounded θ_v), and what training did, log πθ −
log π(θ_v). What is judged is stored: the engine's log μ and the route's π_prox. The other sources are taken for the
batches of the `exact_snapshot` run. A sound source has r_d follow the first and r_s the second; an entangled one lets
staleness leak into r_d. By construction `behavior` has log r_d = 0 and `train_start` log r_s = 0. Note that with
`engines.on_update = "keep"` keys and values of older versions are a discrepancy too; the script recomputes them, so
that rounding is the only one.

The second form trains with each source and prints what each run came to as it ends; finished runs in FOLDER are not run
again, so a stopped study goes on where it was. `stopped` is the share of tokens that the discrepancy mask or the clip
took out, `resets` how often the average restarted. Prints a table, then one JSON line, which has correlations too.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from version_truth import Columns, Truth, gather

from headway.algorithms.proximal import loglinear_proximal
from headway.engine.rounding import Rounding
from headway.models.loading import load_causal_lm
from headway.proximal.average_source import AverageSource
from headway.proximal.samples import fill, samples_of
from headway.proximal.scorer import Scorer
from headway.report.jsonl import read_records
from headway.runtime.learners import replay_learner
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.types import Batch

EXACT = ("exact_snapshot", "exact_model", "exact_interrupt")
DERIVED = ("ewma", "loglinear", "behavior", "train_start")
SOURCES = (*EXACT, *DERIVED)

MOST_POINTS = 3000
"""In each panel of the plot."""


def train(folder: Path, sets: Mapping[str, Any]) -> None:
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in sets.items()]
    command = [sys.executable, "-m", "headway", "train", f"--run={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def settings(options: argparse.Namespace, source: str, seed: int) -> dict[str, Any]:
    return {
        "algorithm": options.algorithm,
        "proximal": source,
        "engines.round_weights": options.rounding,
        "engines.on_update": "recompute",
        "max_staleness": options.staleness,
        "rollout.max_ready_batches": 0,  # data as old as the bound allows, however fast a source is
        "num_steps": options.steps,
        "seed": seed,
        "model.path": options.model,
    }


def factors(folder: RunFolder, source: str, rounding: Rounding) -> Iterator[Columns]:
    """Of each step's tokens: log μ and π_prox as stored, π_prox of the sources that derive it, age, and the truth."""
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
    truth = Truth(load_causal_lm(folder.checkpoint(0)), config.sampling.temperature, rounding)
    for step in recorded_steps(folder.batches):
        batch = read_batch(folder.batches, step)
        truth.learn(step, learner.weights(), oldest=step - config.max_staleness)
        stored = {source: gather("proximal_logprobs", batch)}
        averaged = gather("proximal_logprobs", average.complete(batch))
        yield stored | derived(batch, averaged, score_all(scorer, batch)) | truth.columns(batch)
        learner.accumulate(batch)
        average.after_step(batch, learner.step())


def score_all(scorer: Scorer, batch: Batch) -> np.ndarray:
    """Every token under the parameters that the step starts from."""
    samples = samples_of(batch.groups)
    for sample in samples:
        sample.scores[:] = np.nan
    fill(samples, scorer, None)
    both = zip(samples, batch.responses, strict=True)
    return np.concatenate([s.scores[len(s.token_ids) - len(r.mask) :][r.mask] for s, r in both])


def derived(batch: Batch, averaged: np.ndarray, current: np.ndarray) -> Columns:
    """What is stored or needs no version's own parameters."""
    behavior, versions = gather("behavior_logprobs", batch), gather("versions", batch)
    tensors = [torch.from_numpy(array) for array in (current, behavior, versions)]
    return {
        "current": current,
        "behavior_logprobs": behavior,
        "age": batch.policy_version - versions,
        "ewma": averaged,
        "loglinear": loglinear_proximal(tensors[0], tensors[1], tensors[2], batch.policy_version).numpy(),
        "behavior": behavior,
        "train_start": current,
    }


def split(tokens: Columns, source: str) -> Columns:
    """Of stale tokens: the factors that the source makes, and the truth about them."""
    stale = tokens["age"] > 0
    columns = {
        "log_rd": tokens[source] - tokens["behavior_logprobs"],
        "log_rs": tokens["current"] - tokens[source],
        "discrepancy": tokens["true_exact"] - tokens["true_rounded"],
        "staleness": tokens["true_current"] - tokens["true_exact"],
        "error": tokens[source] - tokens["true_exact"],
    }
    return {name: column[stale].astype(np.float64) for name, column in columns.items()}


def judge(tokens: Columns) -> dict[str, float]:
    """Sizes of a source's factors, and how far each follows the true discrepancy and the true staleness.

    `leak` ± `leak_error` is the slope of log r_d on the true log staleness, 0 for a sound source; `follows` that on the
    true discrepancy, 1 for a sound source. `farthest` is the largest error of log π_prox in nats.
    """
    log_rd, log_rs, error = tokens["log_rd"], tokens["log_rs"], tokens["error"]
    discrepancy, staleness = tokens["discrepancy"], tokens["staleness"]
    (follows, leak), (_, leak_error) = slopes(log_rd, discrepancy, staleness)
    return {
        "mean_abs_log_rd": float(np.abs(log_rd).mean()),
        "mean_abs_log_rs": float(np.abs(log_rs).mean()),
        "rd_discrepancy": correlation(log_rd, discrepancy),
        "rd_staleness": correlation(log_rd, staleness),
        "rs_discrepancy": correlation(log_rs, discrepancy),
        "rs_staleness": correlation(log_rs, staleness),
        "follows": follows,
        "leak": leak,
        "leak_error": leak_error,
        "farthest": float(np.abs(error).max()),
        "outside_band": float((np.abs(log_rd) > np.log(1.01)).mean()),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 when either does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else 0.0


def slopes(log_rd: np.ndarray, *truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of the least-squares fit log r_d ≈ Σ b·truth, and their standard errors."""
    design = np.stack(truth, 1)
    fitted = np.linalg.lstsq(design, log_rd, rcond=None)[0]
    residual = log_rd - design @ fitted
    variance = (residual**2).sum() / (len(log_rd) - len(fitted))
    # Without rounding there is no discrepancy to follow: its column is 0.
    return fitted, np.sqrt(variance * np.diag(np.linalg.pinv(design.T @ design)))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Columns] = {}
    quiet = {"record": True, "evaluation.every": 0, "evaluation.test_size": 0}
    for source in EXACT:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "run"
            train(path, settings(options, source, options.seeds[0]) | quiet)
            steps = list(factors(RunFolder(path), source, options.rounding))
        tokens = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
        for each in (source, *DERIVED) if source == EXACT[0] else (source,):
            found[each] = split(tokens, each)
        print(f"{source}: {json.dumps(judge(found[source]))}", file=sys.stderr, flush=True)
    found = {source: found[source] for source in SOURCES}
    if options.plot:
        draw(found, options.plot)
    return {source: judge(tokens) for source, tokens in found.items()}


def draw(found: dict[str, Columns], path: Path) -> None:
    """log r_d (above) and log r_s (below) of every source on stale tokens, against the true log staleness.

    Where a source is sound the upper cloud is flat, as wide as the discrepancy, and the lower one lies on the diagonal.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reach = float(np.quantile(np.abs(found[EXACT[0]]["staleness"]), 0.99))
    figure, axes = pyplot.subplots(2, len(found), figsize=(2.2 * len(found), 4.6), sharex=True, sharey=True)
    for column, (source, tokens) in enumerate(found.items()):
        some = np.random.default_rng(0).permutation(len(tokens["staleness"]))[:MOST_POINTS]
        for row, (factor, sound) in enumerate((("log_rd", 0.0), ("log_rs", reach))):
            plot = axes[row, column]
            plot.plot([-reach, reach], [-sound, sound], color="0.6", linewidth=1)
            color = "C3" if row else "C0"
            plot.scatter(tokens["staleness"][some], tokens[factor][some], s=2, alpha=0.35, linewidths=0, color=color)
            plot.set(xlim=(-reach, reach), ylim=(-reach, reach))
        axes[0, column].set(title=source)
        axes[1, column].set(xlabel="true log staleness")
    axes[0, 0].set(ylabel="log r_d")
    axes[1, 0].set(ylabel="log r_s")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def train_each(options: argparse.Namespace) -> dict[str, Any]:
    """Test accuracy at start and end with each source, mean and range over seeds. A finished run is not run again."""
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:  # seeds outermost: a study that is stopped early has every source once
        for source in options.sources:
            outcome = train_one(options.out / f"{options.algorithm}-{source}-seed{seed}", options, source, seed)
            found.setdefault(source, []).append(outcome)
            print(f"{source}, seed {seed}: {json.dumps(outcome)}", file=sys.stderr, flush=True)
    return {source: summarize(outcomes) for source, outcomes in found.items()}


def train_one(folder: Path, options: argparse.Namespace, source: str, seed: int) -> dict[str, float]:
    """What one run came to, from `folder`.json where it has been trained before with the same settings."""
    sets, result = settings(options, source, seed), folder.with_suffix(".json")
    if result.is_file():
        stored = json.loads(result.read_text())
        if stored["settings"] != sets:
            raise SystemExit(f"{result} was made with {stored['settings']}; name another folder with --out")
        return stored["outcome"]
    shutil.rmtree(folder, ignore_errors=True)  # half a run of a study that was stopped
    begun = time.monotonic()
    train(folder, sets | {"evaluation.every": 0})
    outcome = outcome_of(list(read_records(folder / "metrics.jsonl"))) | {"seconds": time.monotonic() - begun}
    result.write_text(json.dumps({"settings": sets, "outcome": outcome}))
    shutil.rmtree(folder)
    return outcome


def outcome_of(records: list[dict[str, Any]]) -> dict[str, float]:
    tests = [r["accuracy"] for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    steps = [r for r in records if r["kind"] == "step"]
    return {
        "start": tests[0],
        "end": tests[-1],
        "stopped": statistics.mean(s["stopped_fraction"] for s in steps),
        "staleness": statistics.mean(s["staleness_token_mean"] for s in steps),
        "resets": sum(s.get("proximal_reset", 0.0) for s in steps),
    }


def summarize(outcomes: list[dict[str, float]]) -> dict[str, float]:
    """Means over seeds, and the range of the accuracy at the end."""
    ends = [outcome["end"] for outcome in outcomes]
    means = {name: statistics.mean(o[name] for o in outcomes) for name in outcomes[0]}
    return means | {"lowest": min(ends), "highest": max(ends)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounding", choices=["none", "bfloat16", "int8"], default="int8")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="tiny:0.4m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithm", default="decoupled_ppo", help="one that reads the proximal policy")
    parser.add_argument("--train", action="store_true", help="train with every source instead")
    parser.add_argument("--sources", nargs="+", default=SOURCES, choices=SOURCES, help="to train with")
    parser.add_argument("--out", type=Path, help="where --train keeps its results")
    parser.add_argument("--plot", type=Path, help="write the scatter plots here (needs matplotlib)")
    options = parser.parse_args()
    if options.train and options.out is None:
        parser.error("--train needs --out, a folder for its results")
    results = train_each(options) if options.train else compare(options)
    shown = [name for name in next(iter(results.values())) if not name.startswith(("rd_", "rs_"))]
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("source", no_wrap=True)
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for source, row in results.items():
        table.add_row(source, *(f"{row[name]:.2g}" if row[name] < 1e-3 else f"{row[name]:.3g}" for name in shown))
    Console().print(table)
    facts = {
        "algorithm": options.algorithm,
        "rounding": options.rounding,
        "staleness": options.staleness,
        "steps": options.steps,
    }
    print(json.dumps({"entanglement": "train" if options.train else "factors", **facts, "results": results}))


if __name__ == "__main__":
    main()
