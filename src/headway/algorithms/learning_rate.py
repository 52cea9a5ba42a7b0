"""Learning-rate scale from the effective sample size of a stale batch (VCPO)."""

import math

import torch
from torch import Tensor

from headway.algorithms.ratios import log_ratio, response_sum


def vcpo_lr_scale(sequence_log_ratio: Tensor, *, cap: float = 8.0) -> tuple[Tensor, Tensor]:
    """sqrt(min(1, ESS/B)), ESS = (Σw)²/Σw² over responses, w = min(Π_t r, cap).

    Args:
        sequence_log_ratio: `[B]`, Σ_t log(πθ/μ) of every response of the whole optimizer batch.
        cap: truncation of the response ratio.

    Returns:
        The scale of the learning rate and the ESS, detached scalars.

    Raises:
        ValueError: empty batch.
    """
    if sequence_log_ratio.numel() == 0:
        raise ValueError("vcpo_lr_scale needs at least one response")
    capped = sequence_log_ratio.detach().clamp(max=math.log(cap))
    # Relative to the largest, in log space: a long response drifts by hundreds of nats, and e^−104 is 0 in float32.
    weights = (capped - capped.max()).exp()
    ess = weights.sum().square() / weights.square().sum()
    return (ess / len(weights)).clamp(max=1.0).sqrt(), ess


def response_log_ratios(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Σ_t δ of each response with at least one token, `[B']`, detached: the input of `vcpo_lr_scale`."""
    mask = mask.bool()
    delta = torch.where(mask, log_ratio(logprobs.detach(), behavior_logprobs), 0.0)
    return response_sum(delta, mask).squeeze(1)[mask.any(1)]
