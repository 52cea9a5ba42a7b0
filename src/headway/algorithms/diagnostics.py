"""Numbers every ratio method can report; all detached, all scalars, a handful of tensor operations."""

import torch
from torch import Tensor

from headway.algorithms.ratios import log_ratio, response_sum

Metrics = dict[str, Tensor]

QUADRANTS = ("positive_up", "positive_down", "negative_up", "negative_down")
"""Sign of the advantage × side of the ratio: `positive_up` is A > 0, log r > 0 (already pushed the right way)."""


def policy_diagnostics(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Metrics:
    """How far the policy is from the one that sampled, over the tokens given. Masked positions may hold NaN.

    Args:
        logprobs, behavior_logprobs, advantages, mask: `[B, T]`.

    Returns:
        `mean_abs_delta`, `max_ratio`, `k3_behavior_policy` = E[r − 1 − δ] and
        `k3_policy_behavior` = E[1/r − 1 + δ] (nats), `ess_tokens` = (Σr)²/(N·Σr²), `ess_responses` (the same over
        whole-response ratios), and `share_<quadrant>`, the fraction of tokens in each of `QUADRANTS`.
    """
    mask = mask.bool()
    delta = torch.where(mask, log_ratio(logprobs.detach(), behavior_logprobs.detach()), 0.0)
    active = mask.flatten().to(delta.dtype)
    num_tokens = active.sum().clamp(min=1)
    flat = delta.flatten()
    ratio = flat.exp()
    features = torch.stack([flat.abs(), ratio, ratio.square(), torch.expm1(flat) - flat, torch.expm1(-flat) + flat])
    mean_abs, mean_ratio, mean_square, k3_forward, k3_reverse = (features @ active / num_tokens).unbind()
    metrics = {
        "mean_abs_delta": mean_abs,
        "max_ratio": (ratio * active).max() if flat.numel() else ratio.sum(),
        "k3_behavior_policy": k3_forward,
        "k3_policy_behavior": k3_reverse,
        "ess_tokens": mean_ratio.square() / mean_square.clamp(min=torch.finfo(delta.dtype).tiny),
        "ess_responses": effective_fraction(response_sum(delta, mask).squeeze(1), mask.any(1)),
    }
    shares = _by_quadrant(mask, delta, advantages.detach(), mask)
    return metrics | {f"share_{name}": value for name, value in zip(QUADRANTS, shares, strict=True)}


def proximal_diagnostics(
    logprobs: Tensor, behavior_logprobs: Tensor, proximal_logprobs: Tensor, mask: Tensor
) -> Metrics:
    """The two factors of r = r_d · r_s: discrepancy r_d = π_prox/μ and staleness r_s = πθ/π_prox.

    Args:
        logprobs, behavior_logprobs, proximal_logprobs, mask: `[B, T]`.

    Returns:
        `mean_abs_log_rd`, `mean_abs_log_rs`, nats.
    """
    discrepancy = log_ratio(proximal_logprobs, behavior_logprobs)
    staleness = log_ratio(logprobs.detach(), proximal_logprobs)
    return {
        "mean_abs_log_rd": active_mean(discrepancy.abs(), mask),
        "mean_abs_log_rs": active_mean(staleness.abs(), mask),
    }


def teacher_diagnostics(
    student_logprobs: Tensor, teacher_logprobs: Tensor, rollout_logprobs: Tensor | None, mask: Tensor
) -> Metrics:
    """KL(πθ‖q) from the student to the teacher, estimated on draws `[B, T, m]` of the policy that rolled out.

    With δ = log q − log πθ and ρ = πθ/p_old (1 when `rollout_logprobs` is None): `teacher_kl` = E[ρ·(e^δ − 1 − δ)]
    (k3, never negative) and `teacher_kl_k1` = −E[ρ·δ], nats, over sampled tokens. Unbiased where p_old covers πθ.
    """
    mask = mask.bool()
    active = mask.unsqueeze(-1)
    student = torch.where(active, student_logprobs.detach(), 0.0)
    delta = torch.where(active, log_ratio(teacher_logprobs, student), 0.0)
    ratio = torch.ones_like(delta)
    if rollout_logprobs is not None:
        ratio = torch.where(active, log_ratio(student, rollout_logprobs), 0.0).exp()
    return {
        "teacher_kl": active_mean((ratio * (torch.expm1(delta) - delta)).mean(-1), mask),
        "teacher_kl_k1": active_mean((-ratio * delta).mean(-1), mask),
    }


def stopped_metrics(stopped: Tensor, delta: Tensor, advantages: Tensor, mask: Tensor) -> Metrics:
    """Fraction of sampled tokens whose gradient the method cuts to 0: in all, and in each of `QUADRANTS`.

    Args:
        stopped: `[B, T]` bool.
        delta: `[B, T]`, log of the ratio that was judged.
    """
    stopped = stopped & mask
    parts = _by_quadrant(stopped, delta.detach(), advantages, mask)
    metrics = {"stopped_fraction": active_mean(stopped, mask)}
    return metrics | {f"stopped_{name}": value for name, value in zip(QUADRANTS, parts, strict=True)}


def active_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of a detached quantity over sampled tokens; 0 when there are none. Booleans give a fraction."""
    values = values.detach()
    if values.dtype == torch.bool:
        # Counts divide as float64: as float32 a fraction would be the one inexact number in a float64 check.
        return (values & mask).sum().double() / mask.sum().clamp(min=1)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def effective_fraction(log_weights: Tensor, present: Tensor) -> Tensor:
    """(Σw)²/(n·Σw²) in (0, 1] over the n entries present; 0 when there are none. Invariant to the scale of w."""
    if log_weights.numel() == 0:
        return log_weights.sum()
    top = torch.where(present, log_weights, -torch.inf).max().clamp(min=torch.finfo(log_weights.dtype).min)
    weights = torch.where(present, (log_weights - top).exp(), 0.0)
    tiny = torch.finfo(weights.dtype).tiny
    return weights.sum().square() / (present.sum() * weights.square().sum()).clamp(min=tiny)


def balance(positive: Tensor, negative: Tensor) -> Tensor:
    """Σ⁺/Σ⁻; 0 when there is nothing below the line."""
    return torch.where(negative > 0, positive / torch.where(negative > 0, negative, 1.0), 0.0)


def _by_quadrant(flag: Tensor, delta: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    positive, negative = flag & (advantages > 0), flag & (advantages < 0)
    up, down = delta > 0, delta < 0
    cells = torch.stack([positive & up, positive & down, negative & up, negative & down])
    return (cells.flatten(1).sum(1).double() / mask.sum().clamp(min=1)).unbind()
