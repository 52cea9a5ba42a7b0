"""Losses that split r = r_d · r_s: a detached weight on π_prox/μ times a loss in u = πθ/π_prox.

r_d is the discrepancy between the training side and the engine, r_s the staleness of the policy. Conventions as in
`headway.algorithms.clipped`; `proximal_logprobs` carries no gradient.
"""

from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.clipped import Loss, clipped_surrogate
from headway.algorithms.diagnostics import active_mean, stopped_metrics
from headway.algorithms.ratios import capped_exp, log_ratio, response_mean, response_sum

Level = Literal["token", "sequence", "geometric"]

MIS_BOUNDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 2.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Published bounds; a geometric mean moves far less than a single ratio."""


def decoupled_ppo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor,
    eps: float,
    cap: float,
) -> Loss:
    """−w·min(u·A, clip(u, 1 ± ε)·A), w = sg(π_prox/μ), and 0 where w > cap (AReaL 2505.24298; PPO-EWMA 2110.00641).

    Args:
        proximal_logprobs: `[B, T]`, nats.

    Returns:
        `[B, T]`; `kept_fraction` (w ≤ cap), `mean_weight`, `stopped_…`. Gradient: −w·u·A inside the clip, else 0.
    """
    weight = log_ratio(proximal_logprobs, behavior_logprobs).exp()
    kept = weight <= cap
    return _weighted_clip(
        logprobs, behavior_logprobs, proximal_logprobs, advantages, mask, torch.where(kept, weight, 0.0), kept, eps
    )


def decoupled_masked_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor,
    eps: float,
    band: float,
    discrepancy_weight: bool,
    eps_high: float | None = None,
) -> Loss:
    """−M·w·r_s·A; M = 1{1/c ≤ r_d ≤ c}·(A ≥ 0 ? r_s ≤ 1 + ε : r_s ≥ 1 − ε), w = sg(r_d) or 1 (2605.12070).

    Args:
        band: c > 1.
        eps: ε on both sides; `eps_high` gives the upper side its own.
        discrepancy_weight: keep r_d as a weight.

    Returns:
        `[B, T]`; `active_fraction` = mean M, `band_fraction` (r_d inside), `stopped_…`.
        Gradient: −w·r_s·A where M = 1, else 0; M and r_d are detached.
    """
    discrepancy = log_ratio(proximal_logprobs, behavior_logprobs).exp()
    staleness = log_ratio(logprobs, proximal_logprobs).exp()
    inside = (discrepancy >= 1 / band) & (discrepancy <= band)
    high = 1 + (eps if eps_high is None else eps_high)
    active = inside & torch.where(advantages >= 0, staleness <= high, staleness >= 1 - eps)
    weight = discrepancy if discrepancy_weight else 1.0
    loss = torch.where(active, -weight * staleness * advantages, 0.0)
    delta = log_ratio(logprobs.detach(), behavior_logprobs)
    return loss, {
        "active_fraction": active_mean(active, mask),
        "band_fraction": active_mean(inside, mask),
        **stopped_metrics(~active, delta, advantages, mask),
    }


def tis_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor,
    level: Literal["token", "sequence"],
    cap: float,
    eps: float,
) -> Loss:
    """sg(min(ρ, C)) · (PPO clip in u), ρ = π_prox/μ per token, or its product over the response (truncated IS).

    Returns:
        `[B, T]`; `kept_fraction` (1), `mean_weight`, `stopped_…`. Gradient: −min(ρ, C)·u·A inside the clip, else 0.

    Raises:
        ValueError: unknown `level`.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"tis: level {level!r} must be 'token' or 'sequence'")
    weight = capped_exp(_log_rho(proximal_logprobs, behavior_logprobs, mask, level), cap).expand_as(logprobs)
    kept = torch.ones_like(mask)
    return _weighted_clip(logprobs, behavior_logprobs, proximal_logprobs, advantages, mask, weight, kept, eps)


def mis_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor,
    level: Level,
    low: float | None,
    high: float | None,
    eps: float,
) -> Loss:
    """1{low ≤ ρ ≤ high} · (PPO clip in u), ρ = π_prox/μ per token, its product, or its geometric mean (masked IS).

    Args:
        low, high: inclusive; None takes the level's published bound.

    Returns:
        `[B, T]`; `kept_fraction`, `mean_weight`, `stopped_…`. Gradient: −u·A on kept tokens inside the clip, else 0.

    Raises:
        ValueError: unknown `level`.
    """
    if level not in MIS_BOUNDS:
        raise ValueError(f"mis: level {level!r} must be one of {', '.join(map(repr, MIS_BOUNDS))}")
    default_low, default_high = MIS_BOUNDS[level]
    rho = _log_rho(proximal_logprobs, behavior_logprobs, mask, level).exp().expand_as(logprobs)
    kept = (rho >= (default_low if low is None else low)) & (rho <= (default_high if high is None else high))
    return _weighted_clip(
        logprobs, behavior_logprobs, proximal_logprobs, advantages, mask, kept.to(logprobs.dtype), kept, eps
    )


def icepop_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor,
    low: float,
    high: float,
    eps: float,
) -> Loss:
    """k·1{low ≤ k ≤ high} · (PPO clip in u), k = sg(π_prox/μ) (2510.18855).

    Returns:
        `[B, T]`; `kept_fraction`, `mean_weight`, `stopped_…`. Gradient: −k·u·A on kept tokens inside the clip, else 0.
    """
    rho = log_ratio(proximal_logprobs, behavior_logprobs).exp()
    kept = (rho >= low) & (rho <= high)
    return _weighted_clip(
        logprobs, behavior_logprobs, proximal_logprobs, advantages, mask, torch.where(kept, rho, 0.0), kept, eps
    )


def _log_rho(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    delta = log_ratio(proximal_logprobs, behavior_logprobs)
    if level == "token":
        return delta
    return response_sum(delta, mask) if level == "sequence" else response_mean(delta, mask)


def _weighted_clip(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weight: Tensor,
    kept: Tensor,
    eps: float,
) -> Loss:
    ratio = log_ratio(logprobs, proximal_logprobs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, 1 - eps, 1 + eps)
    delta = log_ratio(logprobs.detach(), behavior_logprobs)
    return torch.where(kept, weight * loss, 0.0), {
        "kept_fraction": active_mean(kept, mask),
        "mean_weight": active_mean(weight, mask),
        **stopped_metrics(clipped | ~kept, delta, advantages, mask),
    }
