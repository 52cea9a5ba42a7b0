"""The noise floor: how far engine and learner disagree on tokens that the very same parameters sampled."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, math.inf)
"""Nats; noise in tokens the policy is sure of weighs most in ESTR."""

ESTR_TAUS = (0.7, 1.0, 1.6)
PPO_CLIP = 0.2
BANDS = (1.003, 1.01, 1.03)
"""c of an old-logit band 1/c ≤ π_prox/μ ≤ c, as published (2605.12070)."""


@dataclass(frozen=True, slots=True)
class EntropyBin:
    """|δ| of the tokens whose entropy lies in [low, high) nats; `high` is None for the last, open bin."""

    low: float
    high: float | None
    share: float
    mean_abs_delta: float
    p99_abs_delta: float
    max_abs_delta: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A threshold of a method, and the share of on-policy tokens it takes for stale.

    A clip counts tokens beyond either side, though it stops a token on one side only, by the sign of its advantage.
    """

    method: str
    threshold: str
    share: float


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """|δ| = |log πθ − log μ| where πθ and μ are one policy, computed twice. Nats."""

    num_tokens: int
    mean_abs_delta: float
    p99_abs_delta: float
    max_abs_delta: float
    max_abs_response_delta: float
    """Largest |Σδ| of a response: what methods with a response ratio see."""
    k3: float
    """E[r − 1 − δ], estimates KL(μ‖πθ)."""
    bins: tuple[EntropyBin, ...]
    cuts: tuple[Cut, ...]


def noise_floor(logprobs: Tensor, behavior_logprobs: Tensor, behavior_entropy: Tensor, mask: Tensor) -> NoiseFloor:
    """What the methods' thresholds would do to tokens of staleness 0.

    Args:
        logprobs, behavior_logprobs, behavior_entropy, mask: `[B, T]`; masked positions may hold NaN.

    Raises:
        ValueError: no sampled token.
    """
    mask = mask.bool()
    if not mask.any():
        raise ValueError("a noise floor needs at least one sampled token")
    difference = torch.where(mask, (logprobs - behavior_logprobs).double(), 0.0)
    delta, entropy = difference[mask], behavior_entropy[mask].double()
    mean, p99, largest = _spread(delta.abs())
    return NoiseFloor(
        num_tokens=len(delta),
        mean_abs_delta=mean,
        p99_abs_delta=p99,
        max_abs_delta=largest,
        max_abs_response_delta=float(difference.sum(1).abs().max()),
        k3=float((torch.expm1(delta) - delta).mean()),
        bins=_bins(delta.abs(), entropy),
        cuts=_cuts(delta, entropy),
    )


def _bins(size: Tensor, entropy: Tensor) -> tuple[EntropyBin, ...]:
    inner = torch.tensor(ENTROPY_EDGES[1:-1], dtype=entropy.dtype, device=entropy.device)
    index = torch.bucketize(entropy, inner, right=True)
    bins = []
    for i, (low, high) in enumerate(pairwise(ENTROPY_EDGES)):
        inside = size[index == i]
        bins.append(EntropyBin(low, high if high < math.inf else None, len(inside) / len(size), *_spread(inside)))
    return tuple(bins)


def _cuts(delta: Tensor, entropy: Tensor, *, entropy_floor: float = 0.01) -> tuple[Cut, ...]:
    score, ratio = delta.square() / (entropy + entropy_floor), delta.exp()
    estr = [Cut("estr", f"tau {tau}", _share(score > tau)) for tau in ESTR_TAUS]
    clip = Cut("ppo", f"clip {PPO_CLIP}, either side", _share((ratio < 1 - PPO_CLIP) | (ratio > 1 + PPO_CLIP)))
    bands = [Cut("decoupled_masked", f"band {c}", _share((ratio < 1 / c) | (ratio > c))) for c in BANDS]
    return (*estr, clip, *bands)


def _share(flag: Tensor) -> float:
    return float(flag.double().mean())


def _spread(size: Tensor) -> tuple[float, float, float]:
    """Mean, the value that 99 % do not exceed, and maximum; zeros when empty."""
    if not len(size):
        return 0.0, 0.0, 0.0
    return float(size.mean()), float(size.kthvalue(math.ceil(0.99 * len(size))).values), float(size.max())
