"""Advantages from the rewards of a group: one number per response."""

from collections.abc import Callable

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


def centered_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """A_b = R_b − mean of the group (2503.20783).

    Args:
        rewards: `[B]`.
        group: `[B]`, integers; responses to one prompt share a value.

    Returns:
        `[B]`; exactly 0 in a group whose rewards are all equal.
    """
    deviation, _, degenerate = _group_moments(rewards, group)
    return torch.where(degenerate, 0.0, deviation)


def grpo_advantages(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_b = (R_b − mean) / (population std + eps) over the group (2402.03300). Shapes as `centered_advantages`."""
    deviation, counts, degenerate = _group_moments(rewards, group)
    _, index = torch.unique(group, return_inverse=True)
    variance = _sum_by_group(deviation.square(), index) / counts
    return torch.where(degenerate, 0.0, deviation / (variance.sqrt() + eps))


def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """A_b = R_b − mean of the *other* members; 0 for a group of one (2402.14740). Shapes as `centered_advantages`."""
    deviation, counts, degenerate = _group_moments(rewards, group)
    return torch.where(degenerate, 0.0, deviation * counts / (counts - 1).clamp(min=1))


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "centered": centered_advantages,
    "rloo": rloo_advantages,
}


def compute_advantages(name: str, *, rewards: Tensor, group: Tensor) -> tuple[Tensor, Metrics]:
    """Advantages by name, and how many groups teach nothing because all their rewards are equal.

    Returns:
        `[B]` advantages; metrics `num_groups`, `num_degenerate_groups`.

    Raises:
        ValueError: unknown name, or `rewards` and `group` are not both `[B]`.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage {name!r}: choose one of {', '.join(ADVANTAGES)}")
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be [B]")
    _, counts, degenerate = _group_moments(rewards, group)
    metrics = {"num_groups": (1 / counts).sum(), "num_degenerate_groups": (degenerate / counts).sum()}
    return ADVANTAGES[name](rewards, group), metrics


def uncentered_groups(advantages: Tensor, mask: Tensor, group: Tensor, *, tolerance: float = 1e-4) -> Tensor:
    """Groups whose advantages do not sum to 0 over the responses that still have tokens.

    A method whose zero sum holds per whole group (ASymPO, SPO) must not train on them: center again or drop them.

    Args:
        advantages: `[B, T]`, one value per response.
        mask: `[B, T]`.
        group: `[B]`.
        tolerance: allowed |mean| of a group's advantages, as a share of its largest |A|.

    Returns:
        `[n]`, the offending values of `group`, ascending.
    """
    mask = mask.bool()
    present = mask.any(1)
    values = torch.where(mask, advantages, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    ids, index = torch.unique(group, return_inverse=True)
    totals = torch.zeros(len(ids), dtype=values.dtype, device=values.device).index_add_(0, index, values)
    counts = torch.zeros_like(totals).index_add_(0, index, present.to(values.dtype))
    # Relative, so that neither tiny nor huge rewards change the verdict.
    largest = torch.zeros_like(totals).scatter_reduce(0, index, values.abs(), "amax")
    return ids[(totals / counts.clamp(min=1)).abs() > tolerance * largest]


def _group_moments(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per response: deviation from the group's mean, size of the group, whether all its rewards are equal."""
    _, index = torch.unique(group, return_inverse=True)
    counts = _sum_by_group(torch.ones_like(rewards), index)
    mean = _sum_by_group(rewards, index) / counts
    high = rewards.new_full((len(rewards),), -torch.inf).scatter_reduce(0, index, rewards, "amax")[index]
    low = rewards.new_full((len(rewards),), torch.inf).scatter_reduce(0, index, rewards, "amin")[index]
    return rewards - mean, counts, high == low


def _sum_by_group(values: Tensor, index: Tensor) -> Tensor:
    """Σ over the group of each response, `[B]`."""
    return torch.zeros_like(values).index_add_(0, index, values)[index]
