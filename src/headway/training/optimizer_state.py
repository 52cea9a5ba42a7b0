"""AdamW's state as safetensors: named by parameter, so that it survives another order or split of parameters.

Each rank of the learner writes the rows it holds to a file of its own; any number of ranks reads them back.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.errors import HeadwayError
from headway.training.ranks import Ranks

STATE_SCHEMA = 1

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint is not whole or not of this model; the message names the file and the mend."""


def save_optimizer(
    directory: Path,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    previous_gradient: list[Tensor],
    policy_version: int,
    num_skipped: int,
) -> None:
    """Write this rank's state beside the model, and on rank 0 `learner.json`."""
    tensors = {
        f"{moment}.{name}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in ranks.parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }
    # The next step's gradient cosine needs it: a resumed run logs what an unbroken one would have.
    tensors |= {f"gradient.{name}": g for name, g in zip(ranks.parameters, previous_gradient, strict=False)}
    save_file(tensors, directory / _file_name(ranks.rank, ranks.num_ranks))
    if ranks.rank == 0:
        facts = {
            "schema": STATE_SCHEMA,
            "policy_version": policy_version,
            "num_skipped": num_skipped,
            "num_ranks": ranks.num_ranks,
        }
        (directory / "learner.json").write_text(json.dumps(facts))


def load_optimizer(directory: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> tuple[int, int, list[Tensor]]:
    """Restore this rank's state, whatever number of ranks wrote it.

    Returns (policy_version, steps skipped in a row, previous gradient).

    Raises CheckpointError.
    """
    facts = json.loads((directory / "learner.json").read_text())
    if facts["schema"] != STATE_SCHEMA:
        raise CheckpointError(f"{directory} has checkpoint schema {facts['schema']}, this Headway reads {STATE_SCHEMA}")
    num_files = facts.get("num_ranks", 1)
    gradient: list[Tensor] = []
    with ExitStack() as stack:
        paths = [directory / _file_name(rank, num_files) for rank in range(num_files)]
        state = _Files([stack.enter_context(safe_open(path, framework="pt")) for path in paths])
        for name, parameter in ranks.parameters.items():
            if (whole := state.read(f"gradient.{name}")) is not None:
                gradient.append(_fitted(directory, name, ranks.part(whole), parameter))
            found = {moment: state.read(f"{moment}.{name}") for moment in _MOMENTS}
            # A rank without rows has nothing to restore, and before the first step nobody has.
            if parameter.numel() and found["exp_avg"] is not None:
                # Step counters stay where a fused optimizer keeps them: beside the parameter.
                optimizer.state[parameter] = {
                    moment: tensor.to(parameter.device)
                    if moment == "step"
                    else _fitted(directory, name, ranks.part(tensor), parameter)
                    for moment, tensor in found.items()
                    if tensor is not None
                }
    return facts["policy_version"], facts.get("num_skipped", 0), gradient


class _Files:
    """Whole tensors from files that hold rows of them."""

    def __init__(self, files: list[safe_open]) -> None:
        self._files = [(file, set(file.keys())) for file in files]

    def read(self, key: str) -> Tensor | None:
        parts = [file.get_tensor(key) for file, keys in self._files if key in keys]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 or not parts[0].ndim else torch.cat(parts)


def _fitted(directory: Path, name: str, tensor: Tensor, parameter: Tensor) -> Tensor:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"{directory}: optimizer state of {name} has shape {tuple(tensor.shape)}, "
            f"the model's is {tuple(parameter.shape)}"
        )
    # A copy: rows of a whole tensor must not keep all of it in memory.
    return tensor.to(parameter.device).clone()


def _file_name(rank: int, num_ranks: int) -> str:
    return "optimizer.safetensors" if num_ranks == 1 else f"optimizer-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
