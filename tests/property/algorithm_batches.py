"""Random batches for the tests of the losses: holes in the mask, unequal groups, an empty response now and then."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms import ALGORITHMS, compute_loss

torch.set_num_threads(1)

NAMES = sorted(ALGORITHMS)


@dataclass(frozen=True)
class Tensors:
    """Arguments of `compute_loss` by their names."""

    logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    group: Tensor
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_entropy: Tensor

    def rows(self, index: Tensor) -> "Tensors":
        return Tensors(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def with_filler(self, value: float) -> "Tensors":
        """Every token tensor with `value` at masked positions."""
        names = ("logprobs", "advantages", "behavior_logprobs", "proximal_logprobs", "behavior_entropy")
        return replace(self, **{n: torch.where(self.mask, getattr(self, n), value) for n in names})


def make_batch(
    seed: int,
    num_responses: int = 7,
    length: int = 9,
    spread: float = 0.15,
    dtype: torch.dtype = torch.float64,
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    shape = (num_responses, length)
    logprobs = -normal(*shape).abs() - 0.05
    group = torch.randint(0, 3, (num_responses,), generator=generator) * 5
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[torch.rand(num_responses, generator=generator) < 0.1] = False
    return Tensors(
        logprobs=logprobs,
        advantages=center(normal(num_responses), mask, group).unsqueeze(1).expand(shape).contiguous(),
        mask=mask,
        group=group,
        behavior_logprobs=(logprobs + spread * normal(*shape)).clamp(max=-1e-3),
        proximal_logprobs=(logprobs + 0.5 * spread * normal(*shape)).clamp(max=-1e-3),
        behavior_entropy=normal(*shape).abs(),
    )


def center(values: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """`values` minus their mean over the responses of the group that have tokens."""
    present = mask.any(1)
    centered = values.clone()
    for g in group.unique():
        members = (group == g) & present
        if members.any():
            centered[members] -= values[members].mean()
    return centered


def run(name: str, batch: Tensors, **params: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient with respect to `logprobs`, metrics."""
    live = batch.logprobs.clone().requires_grad_()
    loss, metrics = compute_loss(name, **{**vars(replace(batch, logprobs=live)), **params})
    (gradient,) = torch.autograd.grad(loss, live)
    return loss.detach(), gradient, metrics


batches = st.builds(
    make_batch,
    seed=st.integers(0, 2**31),
    num_responses=st.integers(1, 8),
    length=st.integers(1, 10),
    spread=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
)
names = st.sampled_from(NAMES)
