"""Log-prob gap between engine and learner on a mixture of experts, with routing replay off and on.

    python scripts/routing_gap.py [--model tiny:moe] [--responses 320]
    python scripts/routing_gap.py --run RUN [--steps 30]

The engine answers training prompts of the default task; the learner's model scores the same tokens, once with its own
experts and once with the engine's. Three engines: the learner's own weights, the same weights rounded to bfloat16 and
back, and an engine that computes in bfloat16. With `--run`, a folder that was trained with `routing_replay` and
`record`: its batches are trained once more, and scored both ways before each step; the numbers are means over steps.
δ = log πθ − log μ over sampled tokens, in nats. Prints a table, then one JSON line.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headway.algorithms.diagnostics import policy_diagnostics
from headway.config import RunConfig, load_config
from headway.engine.torch_engine import TorchEngine
from headway.models.loading import load_causal_lm, named_weights
from headway.models.policy import response_logprobs
from headway.runtime.learners import replay_learner
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import Task, open_task
from headway.runtime.wiring import episode_settings
from headway.training.batching import Rows, collate
from headway.training.routing import Layout, agreement, collate_routing, replaying
from headway.types import Batch, Completion, Group, Prompt, Response

GROUP_SIZE = 8


def answers(engine: TorchEngine, config: RunConfig, task: Task, num_responses: int) -> Batch:
    """The engine's responses to the first prompts of the training split, as one batch."""
    prompts = [task.environment.prompt("train", i) for i in range(num_responses // GROUP_SIZE)]
    sampling = replace(episode_settings(config, task).sampling, record_routing=True)
    completions = engine.generate([prompt.token_ids for prompt in prompts], sampling, n=GROUP_SIZE)
    return Batch(0, 0, tuple(_group(i, *pair) for i, pair in enumerate(zip(prompts, completions, strict=True))))


def _group(group_id: int, prompt: Prompt, completions: list[Completion]) -> Group:
    return Group(group_id, prompt, tuple(_response(completion) for completion in completions))


def _response(completion: Completion) -> Response:
    return Response(
        token_ids=completion.token_ids,
        mask=np.ones(len(completion.token_ids), np.bool_),
        versions=completion.versions,
        reward=0.0,
        behavior_logprobs=completion.logprobs,
        side=completion.side,
    )


@torch.no_grad()
def gap(model: Any, rows: Rows) -> dict[str, float]:
    """How far the learner's log-probs are from the engine's; with replay where the rows carry routing."""
    attention_mask = torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]
    with replaying(model, rows) as replay:
        logprobs, _ = response_logprobs(model, rows.input_ids, attention_mask, rows.mask)
    assert rows.behavior_logprobs is not None
    delta = (logprobs - rows.behavior_logprobs)[rows.mask].abs()
    found = policy_diagnostics(logprobs, rows.behavior_logprobs, torch.zeros_like(logprobs), rows.mask)
    return {
        "mean_abs_delta": float(delta.mean()),
        "p99_abs_delta": float(delta.quantile(0.99)),
        "max_abs_delta": float(delta.max()),
        "k3_behavior_policy": float(found["k3_behavior_policy"]),
        **agreement([replay] if replay is not None else []),
    }


def compare(model: Any, batch: Batch) -> dict[str, Any]:
    """The gap with replay off and on."""
    rows = collate(batch, pad_id=0)
    replayed = replace(rows, routing=collate_routing(batch, Layout.of(model)))
    return {"off": gap(model, rows), "on": gap(model, replayed), "tokens": int(rows.mask.sum())}


def across_engines(path: str, num_responses: int) -> dict[str, Any]:
    """One model, three engines."""
    config = load_config(None, [f"model.path={path}"])
    task = open_task(config, say=Console(stderr=True).print)
    torch.set_num_threads(1)
    model = load_causal_lm(task.model)
    own = named_weights(model)
    engines = {
        "same weights": (own, torch.float32),
        "bfloat16-rounded weights": (rounded(own), torch.float32),
        "bfloat16 engine": (own, torch.bfloat16),
    }
    results = {}
    for name, (weights, dtype) in engines.items():
        engine = TorchEngine(model.config, max_slots=64, max_length=config.engines.max_length, dtype=dtype)
        engine.load(weights, 0)
        results[name] = compare(model, answers(engine, config, task, num_responses))
    return results


def across_versions(run: Path, num_steps: int) -> dict[str, Any]:
    """A recorded run's stale batches, each before the step it trains."""
    folder, config = RunFolder.open(run)
    learner, model = replay_learner(folder, config), load_causal_lm(folder.checkpoint(0))
    found = []
    for step in islice(recorded_steps(folder.batches), num_steps):
        batch = read_batch(folder.batches, step)
        model.load_state_dict(learner.weights(), strict=False)  # a tied head has no name of its own
        found.append(compare(model, batch))
        learner.train(batch)
    mean = {way: {n: float(np.mean([f[way][n] for f in found])) for n in found[0][way]} for way in ("off", "on")}
    return {f"stale by at most {config.max_staleness}": {**mean, "tokens": sum(f["tokens"] for f in found)}}


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As an engine holds them that was sent bfloat16."""
    return {name: tensor.bfloat16().float() for name, tensor in weights.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny:moe", help="a mixture of experts: tiny:moe, a folder or a hub id")
    parser.add_argument("--responses", type=int, default=320)
    parser.add_argument("--run", type=Path, help="a recorded run with routing_replay")
    parser.add_argument("--steps", type=int, default=30, help="of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run is None:
        results = across_engines(options.model, options.responses)
    else:
        results = across_versions(options.run, options.steps)
    table = Table("engine", "tokens", "replay", "mean |δ|", "99 % |δ|", "largest |δ|", "k3 KL(μ‖πθ)", "same experts")
    for name, result in results.items():
        for replay in ("off", "on"):
            r = result[replay]
            numbers = (r["mean_abs_delta"], r["p99_abs_delta"], r["max_abs_delta"], r["k3_behavior_policy"])
            same = f"{r['routing_agreement']:.4%}" if replay == "on" else ""
            table.add_row(name, str(result["tokens"]), replay, *(f"{n:.2e}" for n in numbers), same)
    Console(width=120).print(table)
    print(json.dumps({"script": "routing_gap", "results": results}))


if __name__ == "__main__":
    main()
