"""The questions of asynchronous on-policy distillation (2606.24143) at a size that two cores answer.

    python scripts/study_distillation.py [--parts losses draws variance async] [--seeds 0 1 2] [--steps 200]
                                         [--out study] [--set key=value …]

Teacher, student and task are those of configs/distill.toml. Parts:

- `losses`: forward and reverse KL, stale and recomputed advantage, clip and none, at staleness 0, 4, 16, 64, 128;
- `draws`: m = 1, 4, 16, 64 of the adopted estimator;
- `variance`: variance of the gradient against m, on recorded batches, draws split into independent parts;
- `async`: synchronous against asynchronous on the same cores, each teacher answer held back by `--latency` seconds.

Every run is the real command line. Its score is exact: KL(πθ‖q) and KL(q‖πθ) over the whole vocabulary, at the states
that the final student samples on validation prompts. Prints a table a part, then one JSON line; `OUT.json` and
`OUT.png` hold the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from headway.algorithms import compute_distillation_loss
from headway.config import RunConfig, load_config
from headway.engine.torch_engine import TorchEngine
from headway.models.loading import load_causal_lm, named_weights
from headway.models.policy import response_gathered_logprobs
from headway.report.jsonl import read_records
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.task import Task, open_task
from headway.training.batching import collate
from headway.types import Sampling

CONFIG = Path(__file__).parents[1] / "configs" / "distill.toml"
STALENESS = (0, 4, 16, 64, 128)
DRAWS = (1, 4, 16, 64)
LOSSES = (
    "forward_kl_teacher_topk",
    "reverse_kl_student_topk",
    "mc_recomputed",
    "mc_stale_advantage",
    "mc_clipped",
    "mc_no_ratio",
)
PROMPTS = 256

Cell = dict[str, Any]


def train(folder: Path, sets: Iterable[str]) -> list[dict[str, Any]]:
    """One run to its end; its metrics."""
    command = [sys.executable, "-m", "headway", "train", str(CONFIG), f"--run={folder}", *(f"--set={s}" for s in sets)]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return list(read_records(folder / "metrics.jsonl"))


@torch.inference_mode()
def exact_kl(student_dir: Path, task: Task, max_tokens: int) -> tuple[float, float]:
    """(KL(πθ‖q), KL(q‖πθ)), nats a token, at states that the student samples itself."""
    student, teacher = load_causal_lm(student_dir), load_causal_lm(task.teacher)
    engine = TorchEngine(student.config, max_slots=64, max_length=64 + max_tokens)
    engine.load(named_weights(student), 0)
    stops = tuple(task.environment.stop_token_ids)
    prompts = [task.environment.prompt("validation", i).token_ids for i in range(PROMPTS)]
    answers = engine.generate(prompts, Sampling(max_tokens=max_tokens, stop_token_ids=stops))
    reverse, forward = [], []
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, answer.token_ids]).astype(np.int64))[None]
        states = slice(len(prompt) - 1, -1)
        p, q = (model(ids).logits[0, states].double().log_softmax(-1) for model in (student, teacher))
        reverse.append((p.exp() * (p - q)).sum(-1))
        forward.append((q.exp() * (q - p)).sum(-1))
    return float(torch.cat(reverse).mean()), float(torch.cat(forward).mean())


def measure(name: str, options: argparse.Namespace, scratch: Path, sets: list[str]) -> Cell:
    """One cell: a run for every seed, its final accuracy, its exact KLs, what it took."""
    found: list[Cell] = []
    for seed in options.seeds:
        folder = scratch / f"{name}-{seed}"
        all_sets = [f"seed={seed}", f"num_steps={options.steps}", "evaluation.every=0", *sets, *options.set]
        records = train(folder, all_sets)
        steps = [r for r in records if r["kind"] == "step"]
        config = load_config(folder / "config.toml")
        task = open_task(config, say=lambda message: None)
        checkpoint = folder / "checkpoints" / f"version-{options.steps:06d}"
        reverse, forward = exact_kl(checkpoint, task, config.sampling.max_response_tokens)
        found.append(
            {
                "accuracy": records[-1]["accuracy"],
                "reverse_kl": reverse,
                "forward_kl": forward,
                "staleness": statistics.mean(s["staleness_token_mean"] for s in steps),
                "seconds": steps[-1]["elapsed_s"],
                "steps_per_s": 1 / statistics.median(s["step_s"] for s in steps),
            }
        )
    cell: Cell = {"seeds": found}
    for key in found[0]:
        values = [f[key] for f in found]
        cell[key] = statistics.mean(values)
        cell[f"{key}_spread"] = max(values) - min(values)
    return cell


def losses(options: argparse.Namespace, scratch: Path) -> dict[str, Cell]:
    cells = {}
    for method in LOSSES:
        for bound in options.staleness:
            sets = [f"distill.method={method}", f"max_staleness={bound}", "distill.num_draws=16", "distill.top_k=16"]
            cells[f"{method}@{bound}"] = measure(f"{method}-{bound}", options, scratch, sets)
    return cells


def draws(options: argparse.Namespace, scratch: Path) -> dict[str, Cell]:
    return {f"m={m}": measure(f"m{m}", options, scratch, [f"distill.num_draws={m}"]) for m in options.draws}


def asynchrony(options: argparse.Namespace, scratch: Path) -> dict[str, Cell]:
    """Synchronous and asynchronous, with the same latency, to the same number of steps."""
    held = f"distill.latency_s={options.latency}"
    cells = {
        name: measure(name, options, scratch, [held, f"max_staleness={bound}"])
        for name, bound in (("sync", 0), ("async", 4))
    }
    cells["async"]["speed_up"] = cells["async"]["steps_per_s"] / cells["sync"]["steps_per_s"]
    return cells


def variance(options: argparse.Namespace, scratch: Path) -> dict[str, Cell]:
    """Mean squared distance of the gradient of m draws to that of all, at the states of recorded batches."""
    most = max(options.draws)
    folder = scratch / "recorded"
    sets = [f"distill.num_draws={most}", "record=true", "num_steps=4", "checkpoint.every=1", "checkpoint.keep=9"]
    train(folder, [*sets, "evaluation.every=0", "evaluation.test_size=0", *options.set])
    config = load_config(folder / "config.toml")
    sums: dict[int, list[float]] = {m: [] for m in options.draws if m < most}
    for step in recorded_steps(folder / "batches"):
        gradients = _gradients(folder, config, step, sums)
        mean = gradients.pop(most)[0]
        for m, parts in gradients.items():
            sums[m].append(statistics.mean(float((part - mean).square().sum()) for part in parts))
    # The parts average to the whole, which takes 1/n of the variance away.
    return {f"m={m}": {"variance": statistics.mean(v) / (1 - m / most)} for m, v in sums.items()}


def _gradients(folder: Path, config: RunConfig, step: int, wanted: Iterable[int]) -> dict[int, list[torch.Tensor]]:
    """m to the gradients of the disjoint sets of m draws, at the version that the batch trained."""
    model = load_causal_lm(folder / "checkpoints" / f"version-{step:06d}")
    rows = collate(read_batch(folder / "batches", step), pad_id=0, cache="draws")
    assert rows.cached_ids is not None and rows.teacher_logprobs is not None and rows.rollout_logprobs is not None
    attention = torch.arange(rows.input_ids.shape[1]) < rows.lengths.unsqueeze(1)
    most = rows.cached_ids.shape[-1]
    found: dict[int, list[torch.Tensor]] = {}
    for m in (*wanted, most):
        for start in range(0, most, m):
            columns = slice(start, start + m)
            student, _ = response_gathered_logprobs(
                model, rows.input_ids, attention, rows.mask, rows.cached_ids[..., columns]
            )
            loss, _ = compute_distillation_loss(
                config.distill.method,
                student_logprobs=student,
                teacher_logprobs=rows.teacher_logprobs[..., columns],
                rollout_logprobs=rows.rollout_logprobs[..., columns],
                mask=rows.mask,
            )
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            found.setdefault(m, []).append(torch.cat([g.flatten() for g in gradient]))
    return found


PARTS = {"losses": losses, "draws": draws, "variance": variance, "async": asynchrony}


def show(part: str, cells: dict[str, Cell]) -> Table:
    columns = [key for key in next(iter(cells.values())) if key != "seeds" and not key.endswith("_spread")]
    table = Table("cell", *columns, title=part)
    for name, cell in cells.items():
        spread = (f" ±{cell[f'{c}_spread'] / 2:.2g}" if f"{c}_spread" in cell else "" for c in columns)
        table.add_row(name, *(f"{cell.get(c, float('nan')):.4g}{s}" for c, s in zip(columns, spread, strict=True)))
    return table


def plot(results: dict[str, dict[str, Cell]], path: Path) -> None:
    """Exact reverse KL against the staleness bound, a line a loss; variance against m where it was measured."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, cell in results.get("losses", {}).items():
        method, bound = name.split("@")
        curves.setdefault(method, []).append((int(bound), cell["reverse_kl"]))
    for method, points in curves.items():
        left.plot(*zip(*points, strict=True), marker="o", label=method)
    left.set(xscale="symlog", yscale="log", xlabel="max_staleness, versions", ylabel="exact KL(πθ‖q), nats a token")
    if curves:
        left.legend(fontsize=7)
    points = [(int(name[2:]), cell["variance"]) for name, cell in results.get("variance", {}).items()]
    if points:
        right.plot(*zip(*points, strict=True), marker="o")
    right.set(xscale="log", yscale="log", xlabel="m, draws a position", ylabel="variance of the gradient")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--draws", type=int, nargs="+", default=DRAWS)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--set", nargs="*", default=[], help="settings of every run, key=value")
    parser.add_argument("--out", type=Path, default=Path("study"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Cell]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            results[part] = PARTS[part](options, Path(scratch))
            Console().print(show(part, results[part]))
    facts = {"bench": "distillation", "steps": options.steps, "latency_s": options.latency, "results": results}
    options.out.with_suffix(".json").write_text(json.dumps(facts))
    plot(results, options.out.with_suffix(".png"))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
