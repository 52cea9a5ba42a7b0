"""What stands in for the behavior entropy when the engine reports none, and how far off it is."""

from typing import Literal

import torch
from torch import Tensor

EntropySource = Literal["engine", "topk_lower_bound", "learner"]
"""`engine`: exact. `topk_lower_bound`: from reported log-probs. `learner`: of the policy being trained, detached."""


def topk_entropy_lower_bound(top_logprobs: Tensor, sampled_logprobs: Tensor, sampled_in_top: Tensor) -> Tensor:
    """The least entropy that a distribution with these k most likely tokens can have.

    With p_k the smallest reported of the top k, r the mass that is left when these and the sampled token are taken
    away, and r = m·p_k + s with m whole and 0 ≤ s < p_k:

        H ≥ −Σ_known p log p − m·p_k·log p_k − s·log s,

    which is at least −Σ_known p log p − r·log p_k, since s ≤ p_k.

    Proof: every token left has q ≤ p_k and Σq = r. −q log q is concave, so its sum is least at a corner of that set:
    all but one q are 0 or p_k, hence m of them are p_k and one is s. The corner exists: the true tokens left are at
    most p_k each and sum to r, so there are at least r/p_k of them. No better bound follows from these numbers.

    Args:
        top_logprobs: `[…, k]`, nats, the k largest in any order; −inf beyond a truncated support.
        sampled_logprobs: `[…]`, of the sampled token.
        sampled_in_top: `[…]` bool, whether it is among the k.

    Returns:
        `[…]` float64, nats, ≥ 0, exact when r = 0. Log-probs in float32 move it by about 1e-5. No gradient.
    """
    top = top_logprobs.detach().double().exp()
    sampled = torch.where(sampled_in_top, 0.0, sampled_logprobs.detach().double().exp())
    known = torch.cat([top, sampled.unsqueeze(-1)], -1)
    smallest = top.amin(-1)
    # A token of no probability among the top k leaves none for the others; what the sum lacks is rounding.
    rest = torch.where(smallest > 0, 1 - known.sum(-1), 0.0).clamp(min=0)
    smallest = smallest.clamp(min=torch.finfo(torch.float64).tiny)
    last = torch.remainder(rest, smallest)
    bound = torch.special.entr(known).sum(-1) - (rest - last) * smallest.log() + torch.special.entr(last)
    return bound.clamp(min=0)


def entropy_error_metrics(used: Tensor, exact: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the entropy used lies from the engine's exact one, in nats, over sampled tokens.

    Args:
        used, exact, mask: `[B, T]`; masked positions may hold NaN.

    Returns:
        `behavior_entropy_error_mean` and `behavior_entropy_error_max` of |used − exact|, and
        `behavior_entropy_error_bias`, the mean of used − exact; 0 without tokens.
    """
    mask = mask.bool()
    error = torch.where(mask, used.detach() - exact, 0.0)
    num_tokens = mask.sum().clamp(min=1)
    return {
        "behavior_entropy_error_mean": error.abs().sum() / num_tokens,
        "behavior_entropy_error_max": error.abs().max(),
        "behavior_entropy_error_bias": error.sum() / num_tokens,
    }
