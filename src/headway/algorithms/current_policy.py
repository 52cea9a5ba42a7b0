"""Losses that read the current policy alone: naive, SPO, ASymPO (2606.03070). No behavior log-probs anywhere.

L = mean over groups of (1/G) Σ_b A_b·C_b·S_b with S_b = −(1/T_b) Σ_t log πθ; the two means and 1/T_b are the
reduction `group_mean`, so the token loss is −A·C·log πθ. Zero sum, and with it ASymPO's balance, holds per whole group.
"""

import math

import torch
from torch import Tensor

from headway.algorithms.clipped import Loss
from headway.algorithms.diagnostics import active_mean
from headway.algorithms.ratios import num_sampled, response_mean


def naive_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor,
    p_low: float | None = None,
    p_high: float | None = None,
) -> Loss:
    """−A·log πθ (C = 1). Metrics and stabilizer as `asympo_loss`. Gradient: −A."""
    bounded, metrics = _stabilized(logprobs, advantages, mask, p_low, p_high)
    _, scale_metrics = _scales(bounded, advantages, mask, weights)
    return -advantages * bounded, metrics | scale_metrics


def spo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor,
    alpha: float,
    p_low: float | None = None,
    p_high: float | None = None,
) -> Loss:
    """−C·A·log πθ, C = 1 where A ≥ 0 and α where A < 0. Metrics and stabilizer as `asympo_loss`. Gradient: −C·A."""
    bounded, metrics = _stabilized(logprobs, advantages, mask, p_low, p_high)
    _, scale_metrics = _scales(bounded, advantages, mask, weights)
    return -torch.where(advantages < 0, alpha * advantages, advantages) * bounded, metrics | scale_metrics


def asympo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor,
    p_low: float | None = None,
    p_high: float | None = None,
    floor: float = 1e-6,
) -> Loss:
    """−A·log πθ/sg(S), S the response's mean token NLL: forward value 0 per group, gradient of mean A·log S.

    Args:
        advantages: `[B, T]`, centered, one value per response.
        weights: `[B, T]`, the global `group_mean` token weights (for the monitor alone).
        p_low, p_high: optional stabilizer, before the mean: log p ← min(log p, log p_high) where A ≥ 0 and
            max(log p, log p_low) where A < 0; past a bound a token keeps its place in the mean, its gradient is 0.
        floor: least S in the denominator.

    Returns:
        `[B, T]`; `positive_scale` = Σ_{A>0} A·S and `negative_scale` = Σ_{A<0} |A|·S (batch sums, no C),
        `log_scale_objective` = mean A·log S (the objective whose gradient this is), `at_low_fraction`,
        `at_high_fraction`. Partial groups break the zero sum: `uncentered_groups` finds them. Gradient: −A/S.
    """
    bounded, metrics = _stabilized(logprobs, advantages, mask, p_low, p_high)
    scale, scale_metrics = _scales(bounded, advantages, mask, weights, floor)
    return -advantages / scale.clamp(min=floor) * bounded, metrics | scale_metrics


def _stabilized(logprobs: Tensor, advantages: Tensor, mask: Tensor, p_low: float | None, p_high: float | None) -> Loss:
    low = -math.inf if p_low is None else math.log(p_low)
    high = math.inf if p_high is None else math.log(p_high)
    negative = advantages < 0
    current = logprobs.detach()
    at_low, at_high = negative & (current < low), ~negative & (current > high)
    bounded = torch.where(at_low, low, torch.where(at_high, high, logprobs))
    return bounded, {
        "at_low_fraction": active_mean(at_low, mask),
        "at_high_fraction": active_mean(at_high, mask),
    }


def _scales(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, floor: float = 1e-6
) -> tuple[Tensor, dict[str, Tensor]]:
    """S per response `[B, 1]`, detached, and the sums the paper is about."""
    scale = -response_mean(logprobs.detach(), mask)
    per_token = torch.where(mask, advantages * scale, 0.0) / num_sampled(mask, scale.dtype)
    return scale, {
        "positive_scale": (per_token * (advantages > 0)).sum(),
        "negative_scale": (per_token * -(advantages < 0).to(scale.dtype)).sum(),
        "log_scale_objective": (weights * advantages * scale.clamp(min=floor).log()).sum(),
    }
