"""The full gradient of a loss, group by group, in bounded memory.

Every policy loss is a function of the log-probs alone, so its gradient is Jᵀc: J the Jacobian of the log-probs, c the
derivative of the loss at each token. c needs no backward pass through the model and holds whole-batch statistics and
global denominators exactly; Jᵀc then splits over groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.algorithms import compute_advantages, compute_loss, find_algorithm, part_statistics, token_weights
from headway.algorithms.diagnostics import active_mean, stopped_metrics
from headway.training.batching import Rows, micro_batches

PROJECTION_DIMS = 16381
"""A prime, so that no width of a matrix lines up with the buckets. Inner products err by about 1/√dims = 0.8%."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One method on one batch, seen from the tokens."""

    loss: float
    coefficients: Tensor
    """`[B, S]`, ∂loss/∂logprobs."""
    advantages: Tensor
    """`[B]`."""
    metrics: Mapping[str, float]


def token_loss(
    algorithm: str, rows: Rows, logprobs: Tensor, *, params: Mapping[str, Any], parts: Sequence[Tensor]
) -> TokenLoss:
    """Loss of the whole batch and its derivative at every token, with the algorithm's own advantages and reduction.

    Args:
        logprobs: `[B, S]` of the policy being trained, detached.
        parts: the micro-batches the learner would take; only a scope of `micro_batch` sees them.

    Raises ValueError as `compute_loss` does.
    """
    settings = find_algorithm(algorithm).resolve(params)
    advantages, advantage_metrics = compute_advantages(
        find_algorithm(algorithm).advantage, rewards=rows.rewards, group=rows.group
    )

    live = logprobs.detach().clone().requires_grad_()
    inputs = {
        "logprobs": live,
        "advantages": advantages.unsqueeze(1).expand_as(live),
        "mask": rows.mask,
        "behavior_logprobs": rows.behavior_logprobs,
        "behavior_entropy": rows.behavior_entropy,
        "proximal_logprobs": rows.proximal_logprobs,
        **settings,
    }
    statistics = part_statistics(algorithm, parts=parts, **inputs)
    loss, metrics = compute_loss(algorithm, **inputs, group=rows.group, statistics=statistics or None)
    (coefficients,) = torch.autograd.grad(loss, live)
    numbers = {name: float(value) for name, value in {**advantage_metrics, **metrics}.items()}
    return TokenLoss(float(loss.detach()), coefficients, advantages, numbers)


def plain_coefficients(advantage: str, reduction: str, rows: Rows, *, l_max: int | None = None) -> Tensor:
    """−weight·A `[B, S]`: the policy gradient −Σ weight·A·∇log π, which on-policy data gives at r = 1."""
    advantages, _ = compute_advantages(advantage, rewards=rows.rewards, group=rows.group)
    return -advantages.unsqueeze(1) * token_weights(reduction, rows.mask, rows.group, l_max=l_max)


def weight_metrics(method: TokenLoss, plain: Tensor, rows: Rows, logprobs: Tensor) -> dict[str, float]:
    """How a method weighs tokens: w = its coefficient over the plain policy gradient's, where that is not 0.

    Returns:
        `mean_weight`, `weight_ess` = (Σw)²/(n·Σw²), `stopped_fraction` (w = 0, as a fraction of all sampled tokens)
        and, where behavior log-probs are known, its parts by quadrant.
    """
    active = rows.mask & (plain != 0)
    weight = torch.where(active, method.coefficients / torch.where(active, plain, 1.0), 0.0)
    stopped = active & (method.coefficients == 0)
    size = active.sum() * weight.square().sum()
    metrics = {
        "mean_weight": active_mean(weight, active),
        "weight_ess": weight.sum().square() / torch.where(size > 0, size, 1.0),
        "stopped_fraction": active_mean(stopped, rows.mask),
    }
    if rows.behavior_logprobs is not None:
        delta = torch.where(rows.mask, logprobs - rows.behavior_logprobs, 0.0)
        metrics |= stopped_metrics(stopped, delta, method.advantages.unsqueeze(1), rows.mask)
    return {name: float(value) for name, value in metrics.items()}


class Projection:
    """A count sketch of gradients: entry i of a parameter is added, with a random sign, to one of `dims` buckets.

    ⟨Px, Py⟩ is unbiased for ⟨x, y⟩ over the signs, with standard deviation about ‖x‖‖y‖·√((1 + cos²)/dims).
    Keeps one byte for each parameter.
    """

    def __init__(self, parameters: Sequence[Tensor], *, dims: int = PROJECTION_DIMS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dims = dims
        self._signs = [
            torch.randint(0, 2, (p.numel(),), generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(p.device)
            for p in parameters
        ]
        # Every parameter starts at a bucket of its own: vectors shorter than `dims` would all share the first ones.
        self._offsets = torch.randint(0, dims, (len(parameters),), generator=generator).tolist()

    def __call__(self, gradient: Sequence[Tensor]) -> Tensor:
        """`[dims]`."""
        out = gradient[0].new_zeros(self.dims)
        for tensor, signs, offset in zip(gradient, self._signs, self._offsets, strict=True):
            signed = tensor.flatten() * signs
            padding = -len(signed) % self.dims
            out += torch.nn.functional.pad(signed, (0, padding)).view(-1, self.dims).sum(0).roll(offset)
        return out


@dataclass(frozen=True, slots=True)
class GroupGradients:
    """A gradient and what each group adds to it."""

    total: list[Tensor]
    """Like the parameters: the sum over groups, exact."""
    projected: Tensor
    """`[G, dims]`."""
    squared_norms: Tensor
    """`[G]`, ‖g‖² of every group, exact."""

    @property
    def norm(self) -> float:
        return float(torch.nn.utils.get_total_norm(self.total))


def group_gradients(
    score: Callable[[Rows], Tensor],
    parameters: Sequence[Tensor],
    rows: Rows,
    coefficients: Tensor,
    *,
    projection: Projection,
    max_tokens: int,
) -> GroupGradients:
    """Σ over tokens of coefficient · ∇log π, one group at a time; holds two gradients at once, never one a group.

    `score(rows)` gives log-probs `[b, s]` with their gradient, in passes of at most `max_tokens`. Responses whose
    coefficients are all 0 cost nothing.
    """
    num_groups = int(rows.group.max()) + 1
    total = [torch.zeros_like(p) for p in parameters]
    projected = total[0].new_zeros(num_groups, projection.dims)
    squared_norms = torch.zeros(num_groups)
    moving = (coefficients != 0).any(1)
    for group in rows.group[moving].unique().tolist():
        chosen = torch.nonzero(moving & (rows.group == group)).flatten()
        gradient = [torch.zeros_like(p) for p in parameters]
        for part in micro_batches(rows.lengths[chosen], max_tokens=max_tokens):
            some = rows.select(chosen[part])
            logprobs = score(some)
            weights = coefficients[chosen[part], : logprobs.shape[1]].to(logprobs)
            found = torch.autograd.grad((logprobs * weights).sum(), parameters, materialize_grads=True)
            _add(gradient, found)
        _add(total, gradient)
        projected[group] = projection(gradient)
        squared_norms[group] = float(torch.nn.utils.get_total_norm(gradient)) ** 2
    return GroupGradients(total, projected, squared_norms)


def gradient_cosine(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """⟨a, b⟩/(‖a‖‖b‖) over all parameters, exact; 0 when either is zero."""
    dot = sum(float((a * b).sum()) for a, b in zip(one, two, strict=True))
    norms = float(torch.nn.utils.get_total_norm(one) * torch.nn.utils.get_total_norm(two))
    return dot / norms if norms else 0.0


def _add(total: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for into, tensor in zip(total, more, strict=True):
        into.add_(tensor)
