"""Arithmetic of the cheap proximal policies: averaged parameters, and log-linear interpolation (2605.12070)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def ewma_beta(window: float) -> float:
    """β = W/(W + 2), W the staleness window in versions; the mean age of what is averaged is W/2 updates."""
    if window < 0:
        raise ValueError(f"window {window} must be at least 0")
    return window / (window + 2)


@dataclass(frozen=True, slots=True)
class EwmaStep:
    """One update of a bias-corrected average: θ_prox ← theta_share·θ + (1 − theta_share)·θ_prox.

    Example: `EwmaStep(weight=1.0, theta_share=1.0)` is a first step or a restart: the average becomes θ.
    """

    weight: float
    """w after the update; hand it to the next one."""
    theta_share: float


def ewma_step(weight: float, beta: float, *, restart: bool = False) -> EwmaStep:
    """w ← 1 + β·w, θ_prox ← θ/w + β·(w_prev/w)·θ_prox; the first step (w_prev = 0) and a restart return θ.

    Args:
        weight: w after the previous update, 0 before the first.
        beta: decay in [0, 1); see `ewma_beta`.
        restart: forget the past, θ_prox ← θ and w ← 1.

    Raises:
        ValueError: `beta` outside [0, 1) or a negative weight.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta {beta} must lie in [0, 1)")
    if weight < 0:
        raise ValueError(f"weight {weight} must be at least 0")
    updated = 1.0 if restart else 1.0 + beta * weight
    return EwmaStep(weight=updated, theta_share=1.0 / updated)


def ewma_restarts(active_fraction: float, reset_below: float = 0.9) -> bool:
    """Whether too few tokens survived discrepancy mask and clip for the average to stand for the sampler any more."""
    return active_fraction < reset_below


def loglinear_alpha(versions_behind: Tensor) -> Tensor:
    """α = 1/(n + 1), n = version being trained − version that sampled the token."""
    return 1.0 / (versions_behind + 1)


def loglinear_proximal(logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, policy_version: int) -> Tensor:
    """log π_prox = α·log μ + (1 − α)·log πθ, α = 1/(n + 1); n = 0 gives π_prox = μ. No extra forward, no gradient.

    Args:
        logprobs, behavior_logprobs: `[B, T]`, nats.
        versions: `[B, T]` integers, −1 on tokens nobody sampled (their result means nothing).
        policy_version: version being trained.

    Returns:
        `[B, T]`, detached.

    Raises:
        ValueError: a token claims a version newer than `policy_version`.
    """
    behind = policy_version - versions
    if bool((behind < 0).any()):
        raise ValueError(f"versions hold {int(versions.max())}, newer than the trained version {policy_version}")
    alpha = loglinear_alpha(behind.to(logprobs.dtype))
    return torch.lerp(logprobs.detach(), behavior_logprobs.detach(), alpha)


def loglinear_bounds(
    band: tuple[float, float], clip: tuple[float, float], versions_behind: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What base bounds on r_d and r_s mean as bounds on r = πθ/μ when π_prox is log-linear at n ≥ 1.

    r_d = r^(1−α) and r_s = r^α, hence band → power 1/(1 − α) and clip → power 1/α.

    Raises:
        ValueError: n < 1 (at n = 0 the band binds nothing).
    """
    if versions_behind < 1:
        raise ValueError(f"versions_behind {versions_behind} must be at least 1")
    alpha = 1 / (versions_behind + 1)
    low, high = (bound ** (1 / (1 - alpha)) for bound in band)
    clip_low, clip_high = (bound ** (1 / alpha) for bound in clip)
    return (low, high), (clip_low, clip_high)


def behavior_proximal(logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, policy_version: int) -> Tensor:
    """log π_prox = log μ: r_d = 1, all of r is taken for staleness. Arguments as `loglinear_proximal`."""
    return behavior_logprobs.detach()


AT_LOSS_TIME: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "behavior": behavior_proximal,
    "loglinear": loglinear_proximal,
}
"""Sources that need nothing but what the loss has: (logprobs, behavior_logprobs, versions, policy_version) → π_prox."""
