"""Losses without PPO's clip: log-likelihood or ratio, weighted, gated or masked. Conventions as in `clipped`."""

import torch
from torch import Tensor

from headway.algorithms.clipped import Loss
from headway.algorithms.diagnostics import active_mean, stopped_metrics
from headway.algorithms.ratios import capped_exp, log_ratio, response_sum


def reinforce_loss(logprobs: Tensor, behavior_logprobs: Tensor | None, advantages: Tensor, mask: Tensor) -> Loss:
    """−A·log πθ; needs nothing of the sampler and is biased as soon as the policy has moved. Gradient: −A."""
    return -advantages * logprobs, {}


def cispo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float | None,
    eps_high: float,
) -> Loss:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log πθ: the weight is clipped, no token is dropped (2506.13585).

    Args:
        eps_low: None leaves the lower side open.

    Returns:
        `[B, T]`; `weight_capped_fraction`. Gradient: −clip(r)·A everywhere.
    """
    ratio = log_ratio(logprobs, behavior_logprobs).detach().exp()
    low = None if eps_low is None else 1 - eps_low
    weight = ratio.clamp(min=low, max=1 + eps_high)
    return -weight * advantages * logprobs, {"weight_capped_fraction": active_mean(weight != ratio, mask)}


def sapo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> Loss:
    """−(4/τ)·σ(τ(r − 1))·A, τ by the sign of A: a soft gate in place of the clip (2511.20347).

    Returns:
        `[B, T]`; `mean_gate`, the mean of 4σ(1−σ), 1 at r = 1. Gradient: −4σ(1−σ)·r·A.
    """
    ratio = log_ratio(logprobs, behavior_logprobs).exp()
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantages, {"mean_gate": active_mean(4 * gate * (1 - gate), mask)}


def topr_loss(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """−sg(w)·A·log πθ; w = 1 if A > 0, else the response's product of ratios clipped to [0, 1] (2503.14286).

    Args:
        advantages: `[B, T]`, one value per response.

    Returns:
        `[B, T]`; `mean_weight`, the mean of w over tokens. Gradient: −w·A.
    """
    product = capped_exp(response_sum(log_ratio(logprobs, behavior_logprobs).detach(), mask), 1.0)
    weight = torch.where(advantages > 0, 1.0, product)
    return -weight * advantages * logprobs, {"mean_weight": active_mean(weight, mask)}


def dppo_tv_loss(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, delta: float
) -> Loss:
    """−keep·r·A; drop iff A > 0 and πθ − μ > δ, or A < 0 and πθ − μ < −δ: a bound on probability, not on ratio.

    Returns:
        `[B, T]`; `kept_fraction`, `stopped_…`. Gradient: −r·A on kept tokens, else 0.
    """
    log_r = log_ratio(logprobs, behavior_logprobs)
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    dropped = ((advantages > 0) & (moved > delta)) | ((advantages < 0) & (moved < -delta))
    return _kept_ratio(log_r, advantages, mask, dropped)


def m2po_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    budget: float,
    moment_bound: Tensor | None = None,
) -> Loss:
    """−keep·r·A; the outward-moving tokens with the largest δ² are dropped until their mean δ² ≤ K (2510.01161).

    Outward-moving: A > 0 and r > 1, or A < 0 and r < 1. Tokens with equal δ² fall together.

    Args:
        budget: K, the second moment allowed.
        moment_bound: the smallest δ² to drop, where it was found over other tokens than these (`m2po_statistics`): a
            scalar, or `[B, 1]`.

    Returns:
        `[B, T]`; `kept_fraction`, `second_moment` (mean δ² of outward-moving tokens before the mask), `stopped_…`.
        Gradient: −r·A on kept tokens, else 0.
    """
    log_r = log_ratio(logprobs, behavior_logprobs)
    square = log_r.detach().square()
    outward = outward_moving(log_r, advantages, mask)
    bound = second_moment_bound(square, outward, budget) if moment_bound is None else moment_bound
    loss, metrics = _kept_ratio(log_r, advantages, mask, outward & (square >= bound))
    return loss, metrics | {"second_moment": active_mean(square, outward)}


def m2po_statistics(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    budget: float,
    **_: object,
) -> dict[str, Tensor]:
    """The bound of `m2po_loss` over all tokens given: `{"moment_bound": scalar}`."""
    log_r = log_ratio(logprobs, behavior_logprobs)
    outward = outward_moving(log_r, advantages, mask)
    return {"moment_bound": second_moment_bound(log_r.detach().square(), outward, budget)}


def outward_moving(log_r: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Tokens the policy already moved the way their advantage asks: A > 0 and r > 1, or A < 0 and r < 1."""
    return mask & (((advantages > 0) & (log_r > 0)) | ((advantages < 0) & (log_r < 0)))


def second_moment_bound(square: Tensor, outward: Tensor, budget: float) -> Tensor:
    """The smallest value to drop so that the mean of those below is at most `budget`; inf when none need go.

    Means of an ascending prefix only grow, so the first prefix over budget names the bound; comparing against the
    value, not the position, drops ties together.
    """
    ordered = torch.where(outward, square, torch.inf).flatten().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=square.device)
    over = torch.where(means > budget, ordered, torch.inf)
    return torch.cat([over, over.new_full((1,), torch.inf)]).min()


def _kept_ratio(log_r: Tensor, advantages: Tensor, mask: Tensor, dropped: Tensor) -> Loss:
    loss = torch.where(dropped, 0.0, -log_r.exp() * advantages)
    return loss, {
        "kept_fraction": active_mean(~dropped, mask),
        **stopped_metrics(dropped, log_r, advantages, mask),
    }
