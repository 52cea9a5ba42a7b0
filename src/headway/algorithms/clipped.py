"""Losses that clip the token ratio r = πθ/μ: PPO and its relatives.

Every loss here returns an unreduced `[B, T]` and metrics. Masked positions hold 0 on entry, and only `logprobs`
carries a gradient (`headway.algorithms.compute_loss` sees to both).
"""

import torch
from torch import Tensor

from headway.algorithms.diagnostics import Metrics, active_mean, stopped_metrics
from headway.algorithms.ratios import log_ratio, response_mean

Loss = tuple[Tensor, Metrics]


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r, low, high)·A), and where A < 0 at most c·|A| with `dual_clip` c.

    Args:
        ratio, advantages: `[B, T]`.
        low, high: the two ends of the clip, numbers or `[B, T]`.

    Returns:
        Token loss, and the bool `[B, T]` of tokens whose gradient the clip stopped: A > 0 and r > high, or A < 0
        and r < low, or A < 0 and r > c. Everywhere else the gradient is that of −r·A.
    """
    positive, negative = advantages > 0, advantages < 0
    above, below = positive & (ratio > high), negative & (ratio < low)
    effective = torch.where(above, high, torch.where(below, low, ratio))
    stopped = above | below
    if dual_clip is not None:
        beyond = negative & (ratio > dual_clip)
        effective, stopped = torch.where(beyond, dual_clip, effective), stopped | beyond
    return -effective * advantages, stopped


def ppo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Loss:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) (PPO 1707.06347; DAPO's two bounds 2503.14476; dual clip 1912.09729).

    Args:
        logprobs, behavior_logprobs, advantages: `[B, T]`; log-probs in nats.
        mask: `[B, T]` bool, True on sampled tokens.
        dual_clip: c > 1 bounds the loss of a token with A < 0 by c·|A|.

    Returns:
        `[B, T]` and `stopped_…`. Gradient: −r·A inside the clip, 0 where it holds.
    """
    delta = log_ratio(logprobs, behavior_logprobs)
    loss, stopped = clipped_surrogate(delta.exp(), advantages, 1 - eps_low, 1 + eps_high, dual_clip)
    return loss, stopped_metrics(stopped, delta, advantages, mask)


def estr_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    behavior_entropy: Tensor,
    tau: float,
    entropy_floor: float,
    eps_low: float,
    eps_high: float,
) -> Loss:
    """M · (PPO clip in r), M = 1{δ²/(H + ε) ≤ τ}: an entropy-scaled trust region (2607.22186).

    `tau = inf` leaves the clip alone, `eps_low = eps_high = inf` leaves the mask alone.

    Args:
        behavior_entropy: `[B, T]`, full-vocabulary entropy of the sampling distribution, nats.
        tau: largest squared log-ratio per nat of entropy.
        entropy_floor: ε, nats.

    Returns:
        `[B, T]`; `masked_fraction`, the same by quadrant as `masked_<quadrant>`, and `stopped_…` (mask or clip).
        Gradient: that of the clip where M = 1, else 0; M itself is detached and blind to the sign of A.
    """
    delta = log_ratio(logprobs, behavior_logprobs)
    masked = delta.detach().square() / (behavior_entropy + entropy_floor) > tau
    loss, clipped = clipped_surrogate(delta.exp(), advantages, 1 - eps_low, 1 + eps_high)
    by_mask = stopped_metrics(masked, delta, advantages, mask)
    metrics = {name.replace("stopped", "masked"): value for name, value in by_mask.items()}
    return torch.where(masked, 0.0, loss), metrics | stopped_metrics(masked | clipped, delta, advantages, mask)


def sat_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    quantile: float,
    exponent: float,
    eps_low: float,
    eps_high: float,
    quantile_value: Tensor | None = None,
) -> Loss:
    """−min(r·A, clip(r, 1 − ε_low·c₋, 1 + ε_high·c₊)·A): the clip narrows for the stalest tokens (2607.18722).

    d = sg(log r); tokens with |d| > q, the `quantile` of |d|, get c₊ = ψ(max(d, 0)), c₋ = ψ(max(−d, 0)) with
    ψ(u) = 1/(1 + (u/q)^exponent); all others c = 1. q = 0 turns it off.

    Args:
        quantile_value: q, where it was taken over other tokens than these (`sat_statistics`): a scalar, or `[B, 1]`.

    Returns:
        `[B, T]`; `quantile_value` (mean over tokens), `gate_fraction`, `mean_eps_low` = mean ε_low·c₋,
        `mean_eps_high` = mean ε_high·c₊, `min_scale` = min c, `stopped_…`. Gradient: −r·A inside the narrowed clip;
        none through d, q or c.
    """
    delta = log_ratio(logprobs, behavior_logprobs)
    return narrowed_clip(delta, advantages, mask, quantile, exponent, eps_low, eps_high, quantile_value)


def sat_statistics(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    quantile: float,
    **_: object,
) -> dict[str, Tensor]:
    """q of `sat_loss` over all tokens given: `{"quantile_value": scalar}`."""
    return {"quantile_value": inverse_cdf(log_ratio(logprobs, behavior_logprobs).abs(), mask, quantile)}


def inverse_cdf(values: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Empirical inf{x ≥ 0 : F(x) ≥ quantile} over sampled tokens: their k-th smallest, k = ceil(quantile·n).

    Values are non-negative. 0 when there are no tokens or quantile = 0. Detached scalar.
    """
    ordered = torch.where(mask, values.detach(), torch.inf).flatten().sort().values
    rank = torch.ceil(quantile * mask.sum().double() - 1e-9).long()
    padded = torch.cat([ordered.new_zeros(1), ordered])
    return padded[rank.clamp(0, len(ordered))]


def narrowed_clip(
    delta: Tensor,
    advantages: Tensor,
    mask: Tensor,
    quantile: float,
    exponent: float,
    eps_low: float,
    eps_high: float,
    quantile_value: Tensor | None,
) -> Loss:
    staleness = delta.detach()
    q = inverse_cdf(staleness.abs(), mask, quantile) if quantile_value is None else quantile_value
    gated = (staleness.abs() > q) & (q > 0) & mask
    unit = staleness / torch.where(q > 0, q, 1.0)
    scale_high = torch.where(gated, 1 / (1 + unit.clamp(min=0).pow(exponent)), 1.0)
    scale_low = torch.where(gated, 1 / (1 + (-unit).clamp(min=0).pow(exponent)), 1.0)
    # An ungated token takes the plain number, so that SAT switched off gives the same bits as PPO.
    low = torch.where(gated, 1 - eps_low * scale_low, 1 - eps_low)
    high = torch.where(gated, 1 + eps_high * scale_high, 1 + eps_high)
    loss, stopped = clipped_surrogate(delta.exp(), advantages, low, high)
    metrics = {
        "quantile_value": q if q.ndim == 0 else active_mean(q.expand_as(delta), mask),
        "gate_fraction": active_mean(gated, mask),
        "mean_eps_low": active_mean(eps_low * scale_low, mask),
        "mean_eps_high": active_mean(eps_high * scale_high, mask),
        "min_scale": torch.minimum(scale_low, scale_high).amin() if mask.numel() else delta.new_ones(()),
    }
    return loss, metrics | stopped_metrics(stopped, delta, advantages, mask)


def kpop_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    phi: float,
    eps_low: float,
    eps_high: float,
) -> Loss:
    """1{KL_B(μ‖π) ≤ φ and KL_B(π‖μ) ≤ φ} · (PPO clip in r), KL_B between the Bernoullis "this token or another".

    KL_B(p‖q) = p·log(p/q) + (1−p)·log((1−p)/(1−q)), 1 − p floored at 1e-8.

    Returns:
        `[B, T]`; `kept_fraction`, `stopped_…`. Gradient: that of the clip on kept tokens, else 0; detached mask.
    """
    delta = log_ratio(logprobs, behavior_logprobs)
    current = logprobs.detach()
    forward = _bernoulli_kl(behavior_logprobs, current)
    reverse = _bernoulli_kl(current, behavior_logprobs)
    kept = torch.maximum(forward, reverse) <= phi
    loss, clipped = clipped_surrogate(delta.exp(), advantages, 1 - eps_low, 1 + eps_high)
    return torch.where(kept, loss, 0.0), {
        "kept_fraction": active_mean(kept, mask),
        **stopped_metrics(clipped | ~kept, delta, advantages, mask),
    }


def _bernoulli_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # expm1 keeps 1 − p exact where p is close to 1.
    rest_p, rest_q = ((-torch.expm1(x)).clamp(min=1e-8) for x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p / rest_q).log()


def opsm_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float,
    eps_low: float,
    eps_high: float,
) -> Loss:
    """Off-policy sequence masking: drop a response iff A < 0 and mean_t(log μ − log πθ) > δ; PPO clip on the rest.

    Args:
        advantages: `[B, T]`, one value per response.
        delta: δ, nats per token.

    Returns:
        `[B, T]`; `kept_fraction` of tokens, `stopped_…`. Gradient: that of the clip on kept responses, else 0.
    """
    log_r = log_ratio(logprobs, behavior_logprobs)
    drift = response_mean(-log_r.detach(), mask)
    kept = ~((advantages < 0) & (drift > delta))
    loss, clipped = clipped_surrogate(log_r.exp(), advantages, 1 - eps_low, 1 + eps_high)
    return torch.where(kept, loss, 0.0), {
        "kept_fraction": active_mean(kept, mask),
        **stopped_metrics(clipped | ~kept, log_r, advantages, mask),
    }
