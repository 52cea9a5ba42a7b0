"""The policy on one rank, or sharded over several (FSDP2): what each holds, and what they tell each other.

All ranks make the same calls in the same order. Micro-batches are dealt to them, and what a token weighs was fixed on
the whole batch, so gradients are summed over ranks, never averaged, and no result depends on how many there are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headway.errors import HeadwayError

T = TypeVar("T")


class Ranks(Protocol):
    """This process's part in training one policy."""

    rank: int
    num_ranks: int
    whole: Any
    """The whole policy as a plain model, current after every `gather`; on rank 0 alone, None elsewhere."""
    parameters: Mapping[str, Tensor]
    """What this rank's optimizer moves, by Hugging Face names: its rows of every parameter."""

    def run(self, call: Callable[[Any], T]) -> T:
        """`call(model)` with a model that can be computed with. All ranks, equally often, backward included."""
        ...

    def zero_gradient(self) -> None: ...

    def gradient(self) -> list[Tensor]:
        """This rank's part of the gradient summed over ranks, in the order of `parameters`; also in their `.grad`."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        ...

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm over all ranks' parts."""
        ...

    def first(self, number: float) -> float:
        """Rank 0's number, on every rank."""
        ...

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that is shaped like a parameter."""
        ...

    def gather(self) -> None:
        """Bring the current parameters into `whole`."""
        ...

    def wait(self) -> None:
        """Until all ranks have come here."""
        ...


class OneRank:
    """The whole policy in this process; nobody to talk to."""

    rank, num_ranks = 0, 1

    def __init__(self, model: Any) -> None:
        self.whole = model
        self.parameters: Mapping[str, Tensor] = dict(model.named_parameters())

    def run(self, call: Callable[[Any], T]) -> T:
        return call(self.whole)

    def zero_gradient(self) -> None:
        self.whole.zero_grad(set_to_none=True)

    def gradient(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors)

    def first(self, number: float) -> float:
        return number

    def part(self, whole: Tensor) -> Tensor:
        return whole

    def gather(self) -> None: ...

    def wait(self) -> None: ...


class NotShardable(HeadwayError, ValueError):
    """The model does not say which of its modules are layers."""


class Shards:
    """One rank of several; needs an initialized process group of all of them.

    `model`: the whole policy, the same bits on every rank and on this rank's device; it is sharded in place, every
    layer by itself and the rest as one, rows (dimension 0) split as `torch.chunk` does. `whole`: on rank 0, another
    copy, anywhere. Raises NotShardable.
    """

    def __init__(self, model: Any, whole: Any | None) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.whole: Any = whole
        self._model = model
        self._root = _Root(model)
        mesh = init_device_mesh(model.device.type, (self.num_ranks,))
        for module in (*_layers(model), self._root):
            sharded: Any = fully_shard(module, mesh=mesh)
            # Weights of tokens are global, so the sum over ranks is the gradient. A plain sum: for float32 a factor
            # would be part of the reduction, which gloo does not have.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self.whole_parameters: Mapping[str, DTensor] = dict(model.named_parameters())
        # The optimizer sees plain tensors in the very storage of the shards.
        self.parameters: Mapping[str, Tensor] = {
            name: torch.nn.Parameter(shard.to_local().detach()) for name, shard in self.whole_parameters.items()
        }

    def run(self, call: Callable[[Any], T]) -> T:
        return self._root(call)

    def zero_gradient(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def gradient(self) -> list[Tensor]:
        for shard, parameter in zip(self.whole_parameters.values(), self.parameters.values(), strict=True):
            grad = shard.grad
            parameter.grad = grad.to_local() if isinstance(grad, DTensor) else torch.zeros_like(parameter)
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.sum(torch.nn.utils.get_total_norm(tensors).square()).sqrt()

    def first(self, number: float) -> float:
        told = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(told, src=0)
        return float(told)

    def part(self, whole: Tensor) -> Tensor:
        num_rows = math.ceil(len(whole) / self.num_ranks)
        return whole[self.rank * num_rows : (self.rank + 1) * num_rows]

    @torch.no_grad()
    def gather(self) -> None:
        # A pass without backward leaves the root's parameters whole, and they are about to be out of date.
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        kept = {} if self.whole is None else dict(self.whole.named_parameters())
        for name, shard in self.whole_parameters.items():
            full = shard.full_tensor()
            if name in kept:
                kept[name].copy_(full)

    def wait(self) -> None:
        self.sum(torch.zeros(1))


class _Root(torch.nn.Module):
    """Gathers embeddings, head and the like around any call, as FSDP does around a model's `forward`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[Any], T]) -> T:
        return call(self.model)


def _layers(model: Any) -> list[torch.nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise NotShardable(f"{type(model).__name__} names no layers to shard; set learner.num_ranks = 1")
    return found
