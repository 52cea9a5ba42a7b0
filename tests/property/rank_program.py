"""Every method trained on one rank of several: `python rank_program.py RANK NUM_RANKS STEPS FOLDER CASE…`.

All ranks run it at once. Rank 0 leaves `CASE-NUM_RANKS.safetensors` in the folder: `gradient.…` of the first step,
`weight.…` after the last, and `metric.…` of all steps.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from test_distillation_step import distillation, joint, scored_batch
from test_learner import CONFIG, batch
from test_learner_routing import MOE, routed_batch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from headway.algorithms import ALGORITHMS, DISTILLATIONS
from headway.models.loading import named_weights
from headway.training.guard import Guard, Limits
from headway.training.learner import TorchLearner
from headway.training.objectives import Objective, PolicyObjective
from headway.training.ranks import OneRank, Ranks, Shards
from headway.types import Batch

DENSE = Qwen3Config(**{**CONFIG.to_dict(), "num_hidden_layers": 2, "layer_types": None})


def dense() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(DENSE).double()


def checkpointed() -> Any:
    model = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers have another name for it
        model.gradient_checkpointing_enable()
    return model.train()


def mixture() -> Any:
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(MOE)
    model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.double()


def case(
    objective: Callable[[], Objective],
    make_batch: Callable[[int], Batch] = batch,
    model: Callable[[], Any] = dense,
    guard: Callable[[], Guard | None] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    return {"objective": objective, "batch": make_batch, "model": model, "guard": guard, "options": options}


def policy(algorithm: str, **params: Any) -> Callable[[], Objective]:
    return lambda: PolicyObjective(algorithm, params)


def watched() -> Guard:
    return Guard(Limits(window=2, ess=1.1), action="lower_lr", max_staleness=4)


CASES: dict[str, dict[str, Any]] = {
    **{name: case(policy(name)) for name in ALGORITHMS},
    **{f"distill-{name}": case(partial(distillation, name), scored_batch) for name in DISTILLATIONS},
    "sat-batch": case(policy("sat", scope="batch")),
    "sat_gspo-batch": case(policy("sat_gspo", scope="batch")),
    "joint-m2po": case(partial(joint, "mc_recomputed", "m2po"), scored_batch),
    "vcpo-guard": case(policy("grpo"), guard=watched, vcpo_lr_scale=True),
    "routing": case(policy("grpo"), routed_batch, mixture, routing_replay=True),
    "checkpointing": case(policy("grpo"), model=checkpointed),
    "float32": case(policy("grpo"), model=lambda: dense().float()),
}


def learner(name: str, ranks: Callable[[Any], Ranks]) -> tuple[TorchLearner, Ranks]:
    chosen = CASES[name]
    model = chosen["model"]()
    held = ranks(model)
    one = TorchLearner(
        model,
        ranks=held,
        objective=chosen["objective"](),
        temperature=1.0,
        learning_rate=lambda step: 1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
        gradient_cosine=True,
        micro_batch_tokens=30,
        pad_id=0,
        autocast=torch.float32,
        save_model=lambda directory: None,
        guard=chosen["guard"](),
        **chosen["options"],
    )
    return one, held


def at(step: int, made: Batch) -> Batch:
    return replace(made, step=step, policy_version=step)


def gradient_of(held: Ranks) -> dict[str, Tensor]:
    """Whole, on every rank."""
    parameters: Mapping[str, Any] = held.whole_parameters if isinstance(held, Shards) else held.parameters
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in parameters.items()}


def train(name: str, num_steps: int, ranks: Callable[[Any], Ranks] = OneRank) -> dict[str, Tensor]:
    one, held = learner(name, ranks)
    metrics: dict[str, list[float]] = {}
    found: dict[str, Tensor] = {}
    for step in range(num_steps):
        one.accumulate(at(step, CASES[name]["batch"](step)))
        if step == 0:
            found = {f"gradient.{n}": g.clone() for n, g in gradient_of(held).items()}
        for key, value in one.step().metrics.items():
            metrics.setdefault(key, []).append(value)
    if held.rank == 0:
        found |= {f"weight.{n}": w.clone() for n, w in named_weights(held.whole).items()}
    timed = ("train_s", "trained_tokens_per_s")
    return found | {f"metric.{k}": torch.tensor(v).double() for k, v in metrics.items() if k not in timed}


def main(rank: int, num_ranks: int, num_steps: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = str(folder / f"meeting-{num_ranks}")
    store = dist.FileStore(meeting, num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    for name in names:
        whole = CASES[name]["model"]() if rank == 0 else None
        found = train(name, num_steps, lambda model, whole=whole: Shards(model, whole))
        if rank == 0:
            save_file(found, folder / f"{name}-{num_ranks}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, num_ranks, num_steps, folder, *names = sys.argv[1:]
    main(int(rank), int(num_ranks), int(num_steps), Path(folder), names or list(CASES))
