"""The questions of asynchronous on-policy distillation (2606.24143) at a size that two cores answer.

    python scripts/study_distillation.py FOLDER [--parts losses draws variance async] [--seeds 0 1 2] [--steps 192]
                                         [--jobs 2] [--set key=value …]

A 3M teacher that gets six in ten two-digit sums right, a 0.4M student that starts at one, 16 responses a step. Parts:

- `losses`: forward and reverse KL at exact staleness 0, 4, 16, 64, 128; stale and recomputed advantage, clip and none;
- `draws`: m = 1, 4, 16, 64 of the adopted estimator at staleness 16;
- `variance`: variance of the gradient over draws against m, for all m that divide the most draws, the student half way;
- `async`: synchronous against asynchronous runs on the same cores, each teacher answer held back by `--latency` s.

The first three train with the runtime's own engine, teacher and learner, taken in turn in one process
(distillation_lab.py), `--jobs` runs side by side; `async` is the real command line, one run at a time. All start from
the same two models; a seed changes prompts and samples. The score is exact: KL(πθ‖q) and KL(q‖πθ) over the whole
vocabulary, at the states that the final student samples on validation prompts. Results in FOLDER are kept: a stopped
study goes on where it was. Prints a table a part, then one JSON line; FOLDER holds study.json and study.png.
"""

import argparse
import itertools
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from distillation_lab import Lab
from distillation_plot import plot
from distillation_scores import accuracy, exact_kl, gradient_variance
from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.protocols import SupervisedEnvironment
from headway.report.jsonl import read_records
from headway.runtime.task import open_task

CONFIG = Path(__file__).parents[1] / "configs" / "distill.toml"
MODELS = (
    "task.options={digits = 2}",
    "model.path=tiny:0.4m",
    "model.cold_start_accuracy=0.1",
    "distill.teacher=tiny:3m",
    "distill.teacher_accuracy=0.6",
)
COMMON = (
    *MODELS,
    "distill.method=mc_recomputed",
    "optimizer.lr=6e-4",
    "batch_size=16",
    "sampling.max_response_tokens=4",
    "engines.max_length=32",
    "learner.gradient_cosine=false",
    "guard.action=off",
    "evaluation.every=0",
    "evaluation.test_size=0",
)
STALENESS = (0, 4, 16, 64, 128)
DRAWS = (1, 4, 16, 64)
EVERYWHERE = ("forward_kl_teacher_topk", "mc_recomputed")
VARIANTS = ("reverse_kl_student_topk", "mc_stale_advantage", "mc_clipped", "mc_no_ratio")
PROMPTS = 512
SMOOTHING = 10  # steps that the logged KL is averaged over when the time to a KL is read off

Facts = dict[str, Any]
Cells = dict[str, list[str]]  # name of a cell to the settings of its runs
Measure = Callable[[Path, Sequence[str]], Facts]


def loss_cells(options: argparse.Namespace) -> Cells:
    width = f"distill.num_draws={options.width}", f"distill.top_k={options.width}"
    points = [(method, bound) for method in EVERYWHERE for bound in options.staleness]
    points += [(method, bound) for method in VARIANTS for bound in options.variants_at]
    return {f"{m}@{bound}": [f"distill.method={m}", f"max_staleness={bound}", *width] for m, bound in points}


def draw_cells(options: argparse.Namespace) -> Cells:
    return {f"m={m}": [f"distill.num_draws={m}", f"max_staleness={options.draws_at}"] for m in options.draws}


def variance_cells(options: argparse.Namespace) -> Cells:
    half_way = f"num_steps={options.steps // 2}", "max_staleness=0", f"distill.num_draws={max(options.draws)}"
    return {"variance": list(half_way)}


def async_cells(options: argparse.Namespace) -> Cells:
    held = f"distill.latency_s={options.latency}", "batch_size=64", "distill.num_draws=16"
    steps = f"num_steps={options.async_steps}"
    return {name: [f"max_staleness={bound}", *held, steps] for name, bound in (("sync", 0), ("async", 4))}


def in_the_lab(folder: Path, sets: Sequence[str]) -> Facts:
    """One run of exact staleness in this process."""
    begun = time.monotonic()
    config = load_config(CONFIG, sets)
    task = open_task(config, say=print)
    assert isinstance(task.environment, SupervisedEnvironment)
    lab = Lab(config, task)
    kls, ages = [], []
    for batch in lab.batches():
        ages.append(batch.policy_version - batch.groups[0].oldest_version)
        kls.append(lab.learner.train(batch).metrics["teacher_kl"])
    student, most = lab.learner.model, config.sampling.max_response_tokens
    reverse, forward = exact_kl(student, lab.teacher, task.environment, num_prompts=PROMPTS, max_tokens=most)
    return {
        "accuracy": accuracy(student, task.environment, num_prompts=PROMPTS),
        "reverse_kl": reverse,
        "forward_kl": forward,
        "worst_kl": max(smooth(kls)),
        "staleness": statistics.mean(ages),
        "seconds": time.monotonic() - begun,
    }


def variance_in_the_lab(folder: Path, sets: Sequence[str]) -> Facts:
    """Of the gradient of the last batch of a run, by m."""
    config = load_config(CONFIG, sets)
    lab = Lab(config, open_task(config, say=print))
    batches = lab.batches()
    for batch in itertools.islice(batches, config.num_steps - 1):
        lab.learner.train(batch)
    most = config.distill.num_draws
    widths = [m for m in range(1, most) if most % m == 0]  # disjoint sets of m draws must use every draw once
    found = gradient_variance(lab.learner.model, next(batches), config.distill.method, widths)
    return {f"m={m}": value for m, value in found.items()}


def as_a_run(folder: Path, sets: Sequence[str]) -> Facts:
    """The real command line to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "headway", "train", str(CONFIG), f"--run={folder}", *(f"--set={s}" for s in sets)]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    steps = [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "step"]
    begun = steps[0]["elapsed_s"]  # the start of processes is no part of the pace
    curve = zip((s["elapsed_s"] - begun for s in steps), smooth([s["teacher_kl"] for s in steps]), strict=True)
    return {
        "step_s": statistics.median(s["step_s"] for s in steps),
        "learner_idle": statistics.median(s["learner_idle"] for s in steps),
        "staleness": statistics.mean(s["staleness_token_mean"] for s in steps),
        "seconds": steps[-1]["elapsed_s"] - begun,
        "curve": list(curve),
    }


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Cells], Measure]] = {
    "losses": (loss_cells, in_the_lab),
    "draws": (draw_cells, in_the_lab),
    "variance": (variance_cells, variance_in_the_lab),
    "async": (async_cells, as_a_run),
}


def smooth(values: Sequence[float]) -> list[float]:
    """Means over the last `SMOOTHING` values; over all so far at the start."""
    return [statistics.mean(values[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(values))]


def seconds_to(target: float, curve: Iterable[Sequence[float]]) -> float:
    """Of the first point at or below the target; infinite when there is none."""
    return next((second for second, kl in curve if kl <= target), float("inf"))


def kept(measure: Measure, folder: Path, sets: Sequence[str]) -> Facts:
    """The stored result of these settings, or a new one. Exits where the stored one was made with others."""
    torch.set_num_threads(1)
    file = folder.with_suffix(".json")
    if not file.is_file():
        file.write_text(json.dumps({"sets": list(sets), **measure(folder, sets)}))
    facts = json.loads(file.read_text())
    if facts.pop("sets") != list(sets):
        raise SystemExit(f"{file} was made with other settings than {list(sets)}; name another folder")
    told = ", ".join(f"{key} {value:.4g}" for key, value in facts.items() if key != "curve")
    print(f"{folder.name}: {told}", flush=True)
    return facts


def run_part(part: str, options: argparse.Namespace, common: Sequence[str]) -> dict[str, Facts]:
    """Every cell with every seed; seeds outermost, so a study that is stopped early has every cell once."""
    make_cells, measure = PARTS[part]
    cells = make_cells(options)
    jobs = 1 if part == "async" else options.jobs
    found: dict[str, list[Facts]] = {name: [] for name in cells}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = []
        for seed in options.seeds:
            for name, sets in cells.items():
                settings = [*common, *sets, f"seed={seed}", *options.set]
                waiting.append((name, pool.submit(kept, measure, options.folder / f"{name}-{seed}", settings)))
        try:
            for name, future in waiting:
                found[name].append(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: summary(facts) for name, facts in found.items()}


def summary(seeds: Sequence[Facts]) -> Facts:
    """Mean and half the range over seeds of every number; the curves as they are."""
    cell: Facts = {"curves": [facts["curve"] for facts in seeds]} if "curve" in seeds[0] else {}
    for key in seeds[0]:
        if key != "curve":
            values = [facts[key] for facts in seeds]
            cell[key] = statistics.mean(values)
            cell[f"{key}_spread"] = (max(values) - min(values)) / 2
    return cell


def add_speed_up(cells: dict[str, Facts], target: float) -> None:
    """Synchronous over asynchronous: seconds a step, and seconds to the target KL."""
    for cell in cells.values():
        cell["seconds_to_kl"] = statistics.mean(seconds_to(target, curve) for curve in cell["curves"])
    cells["async"]["step_speed_up"] = cells["sync"]["step_s"] / cells["async"]["step_s"]
    cells["async"]["kl_speed_up"] = cells["sync"]["seconds_to_kl"] / cells["async"]["seconds_to_kl"]


def show(part: str, cells: dict[str, Facts]) -> Table:
    columns = list(dict.fromkeys(k for cell in cells.values() for k in cell if not k.endswith(("_spread", "curves"))))
    table = Table("cell", *columns, title=part)
    for name, cell in cells.items():
        spread = (f" ±{cell[f'{c}_spread']:.2g}" if f"{c}_spread" in cell else "" for c in columns)
        numbers = (f"{cell[c]:.4g}" if c in cell else "" for c in columns)
        table.add_row(name, *(f"{n}{s}" for n, s in zip(numbers, spread, strict=True)))
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--async-steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--variants-at", type=int, nargs="+", default=[16])
    parser.add_argument("--width", type=int, default=4, help="draws, and k, of the losses")
    parser.add_argument("--draws", type=int, nargs="+", default=DRAWS)
    parser.add_argument("--draws-at", type=int, default=16, help="their staleness")
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--target-kl", type=float, default=0.75, help="of the time in part async")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of every run")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    task = open_task(load_config(CONFIG, [*MODELS, *options.set]), say=print)
    common = (*COMMON, f"model.path={task.model}", f"distill.teacher={task.teacher}", f"num_steps={options.steps}")
    results: dict[str, dict[str, Facts]] = {}
    for part in options.parts:
        results[part] = run_part(part, options, common)
        if part == "async":
            add_speed_up(results[part], options.target_kl)
        Console().print(show(part, results[part]))
    plot(results, options.folder / "study.png")
    facts = {"study": "distillation", "steps": options.steps, "latency_s": options.latency, "results": results}
    (options.folder / "study.json").write_text(json.dumps(facts))
    for cell in results.get("async", {}).values():
        del cell["curves"]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
