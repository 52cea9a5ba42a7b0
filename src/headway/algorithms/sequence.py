"""Losses on the ratio of a whole response: GSPO, SAT-GSPO. Conventions as in `headway.algorithms.clipped`."""

from torch import Tensor

from headway.algorithms.clipped import Loss, clipped_surrogate, inverse_cdf, narrowed_clip
from headway.algorithms.diagnostics import stopped_metrics
from headway.algorithms.ratios import sequence_log_ratio


def gspo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> Loss:
    """PPO clip in s_bt = sg(s_b)·πθ/sg(πθ), s_b = exp(mean_t δ): the length-normalized response ratio (2507.18071).

    Returns:
        `[B, T]`; `stopped_…` judged by s_b. Gradient: −s_b·A_t on the tokens of responses inside the clip, else 0.
    """
    log_s = sequence_log_ratio(logprobs, behavior_logprobs, mask)
    loss, stopped = clipped_surrogate(log_s.exp(), advantages, 1 - eps_low, 1 + eps_high)
    return loss, stopped_metrics(stopped, log_s, advantages, mask)


def sat_gspo_loss(
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
    """`sat_loss` with r replaced by the response ratio s_bt of `gspo_loss`, spread over tokens before the quantile.

    Metrics as `sat_loss`. Gradient: −s_b·A_t inside the narrowed clip, else 0 (2607.18722).
    """
    log_s = sequence_log_ratio(logprobs, behavior_logprobs, mask)
    return narrowed_clip(log_s, advantages, mask, quantile, exponent, eps_low, eps_high, quantile_value)


def sat_gspo_statistics(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    quantile: float,
    **_: object,
) -> dict[str, Tensor]:
    """q of `sat_gspo_loss` over all tokens given: `{"quantile_value": scalar}`."""
    log_s = sequence_log_ratio(logprobs, behavior_logprobs, mask)
    return {"quantile_value": inverse_cdf(log_s.abs(), mask, quantile)}
