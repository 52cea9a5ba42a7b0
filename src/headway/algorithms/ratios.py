"""Log-ratios and the sums over a response that the methods share. Masked positions hold 0 on entry."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 40.0
"""|log r| beyond this is a broken sample; the bound keeps e^(2·log r) finite in float32, so no gradient turns NaN."""


def log_ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """δ = log π − log anchor, held within ±40. Gradient: 1 with respect to each argument, 0 at the bound."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def num_sampled(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """max(T_b, 1) as `[B, 1]`: a divisor that leaves the zero sum of an empty response at 0."""
    return mask.sum(1, keepdim=True).clamp(min=1).to(dtype)


def response_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ_t over sampled tokens, `[B, 1]`."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True)


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(1/T_b) Σ_t over sampled tokens, `[B, 1]`; 0 for an empty response."""
    return response_sum(values, mask) / num_sampled(mask, values.dtype)


def capped_exp(log_values: Tensor, cap: float) -> Tensor:
    """min(e^x, cap), capped in log space, so a product over a long response cannot overflow."""
    return log_values.clamp(max=float(torch.tensor(cap, dtype=torch.float64).log())).exp()


def sequence_log_ratio(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalized log-ratio of a response, (1/T_b) Σ_t δ_t, spread over its tokens (GSPO, 2507.18071).

    Returns:
        `[B, T]`. Its value is the mean; its gradient with respect to `logprobs` is 1 at the token itself, so that
        token credit weighs only its own token: s_bt = sg(s_b)·πθ/sg(πθ).
    """
    delta = log_ratio(logprobs, behavior_logprobs)
    mean = response_mean(delta.detach(), mask)
    return torch.where(mask, mean + (logprobs - logprobs.detach()), 0.0)
