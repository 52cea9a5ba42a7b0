"""AdamW's state as safetensors: named by parameter, so that it survives another order or split of parameters."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import HeadwayError

STATE_SCHEMA = 1

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint is not whole or not of this model; the message names the file and the mend."""


def save_optimizer(
    directory: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    previous_gradient: list[Tensor],
    policy_version: int,
) -> None:
    """Write `optimizer.safetensors` and `learner.json` beside the model."""
    tensors = {
        f"{moment}.{name}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }
    # The next step's gradient cosine needs it: a resumed run logs what an unbroken one would have.
    tensors |= {f"gradient.{name}": g for name, g in zip(parameters, previous_gradient, strict=False)}
    save_file(tensors, directory / "optimizer.safetensors")
    (directory / "learner.json").write_text(json.dumps({"schema": STATE_SCHEMA, "policy_version": policy_version}))


def load_optimizer(
    directory: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[int, list[Tensor]]:
    """Restore the state; return (policy_version, previous gradient). Raises CheckpointError."""
    facts = json.loads((directory / "learner.json").read_text())
    if facts["schema"] != STATE_SCHEMA:
        raise CheckpointError(f"{directory} has checkpoint schema {facts['schema']}, this Headway reads {STATE_SCHEMA}")
    tensors = load_file(directory / "optimizer.safetensors")
    for name, parameter in parameters.items():
        state = {moment: tensors.get(f"{moment}.{name}") for moment in _MOMENTS}
        if state["exp_avg"] is None:
            continue  # saved before the first step
        if state["exp_avg"].shape != parameter.shape:
            raise CheckpointError(
                f"{directory}: optimizer state of {name} has shape {tuple(state['exp_avg'].shape)}, "
                f"the model's is {tuple(parameter.shape)}"
            )
        # Step counters stay where a fused optimizer keeps them: beside the parameter.
        optimizer.state[parameter] = {m: t.to(parameter.device) for m, t in state.items() if t is not None}
    gradient = [tensors[f"gradient.{n}"] for n in parameters if f"gradient.{n}" in tensors]
    return facts["policy_version"], [g.to(p.device) for g, p in zip(gradient, parameters.values(), strict=False)]
