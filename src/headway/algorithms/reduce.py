"""Reductions as weights: loss = Σ token_loss · weight, with weights made once from the whole batch.

A weight depends on token counts alone, so micro-batches and ranks that slice the same weights add up to the
whole-batch loss exactly. Dropped tokens stay counted; a response without sampled tokens is not counted at all.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def token_mean(num_tokens: Tensor, group: Tensor | None, l_max: int | None) -> Tensor:
    """1/N."""
    return torch.ones_like(num_tokens) / num_tokens.sum()


def seq_mean_token_mean(num_tokens: Tensor, group: Tensor | None, l_max: int | None) -> Tensor:
    """1/(B·T_b)."""
    return 1 / (_num_responses(num_tokens) * num_tokens)


def seq_mean_token_sum(num_tokens: Tensor, group: Tensor | None, l_max: int | None) -> Tensor:
    """1/B."""
    return torch.ones_like(num_tokens) / _num_responses(num_tokens)


def fixed(num_tokens: Tensor, group: Tensor | None, l_max: int | None) -> Tensor:
    """1/(B·L_max) (Dr.GRPO, 2503.20783)."""
    if l_max is None:
        raise ValueError("reduction 'fixed' needs l_max: pass the largest response length of the run")
    return torch.ones_like(num_tokens) / (_num_responses(num_tokens) * l_max)


def group_mean(num_tokens: Tensor, group: Tensor | None, l_max: int | None) -> Tensor:
    """1/(P·G_b·T_b): mean over tokens, then over the G responses of a group, then over the P groups."""
    if group is None:
        raise ValueError("reduction 'group_mean' needs group: pass which responses share a prompt, [B]")
    ids, index = torch.unique(group, return_inverse=True)
    present = (num_tokens > 0).to(num_tokens.dtype)
    sizes = present.new_zeros(len(ids)).index_add_(0, index, present)
    return 1 / ((sizes > 0).sum() * sizes[index] * num_tokens)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor | None, int | None], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "fixed": fixed,
    "group_mean": group_mean,
}


def response_weights(
    reduction: str,
    num_tokens: Tensor,
    group: Tensor | None = None,
    *,
    l_max: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What one token of each response weighs. Ranks need to share only the token counts to agree on it.

    Args:
        reduction: a name in `REDUCTIONS`.
        num_tokens: `[B]`, sampled tokens of every response of the whole optimizer batch.
        group: `[B]`, for `group_mean`.
        l_max: for `fixed`.
        dtype: of the result.

    Returns:
        `[B]`; 0 for responses without tokens.

    Raises:
        ValueError: unknown reduction, or `group` or `l_max` missing where it is needed.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}")
    counts = num_tokens.to(dtype)
    return torch.where(counts > 0, REDUCTIONS[reduction](counts, group, l_max), 0.0)


def token_weights(
    reduction: str,
    mask: Tensor,
    group: Tensor | None = None,
    *,
    l_max: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`response_weights` spread over the sampled tokens, `[B, T]`; made on the whole batch, sliced by its rows.

    Example:
        >>> token_weights("token_mean", torch.tensor([[1, 1], [1, 0]])).tolist()[1]
        [0.3333333432674408, 0.0]
    """
    mask = mask.bool()
    weights = response_weights(reduction, mask.sum(1), group, l_max=l_max, dtype=dtype)
    return torch.where(mask, weights.unsqueeze(1), 0.0)


def _num_responses(num_tokens: Tensor) -> Tensor:
    return (num_tokens > 0).sum()
