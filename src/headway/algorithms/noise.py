"""The noise floor: how far engine and learner disagree on tokens that the very same parameters sampled."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.corrections import MIS_BOUNDS
from headway.algorithms.ratios import response_mean, response_sum
from headway.algorithms.table import find_algorithm

ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, math.inf)
"""Nats; noise in tokens the policy is sure of weighs most in ESTR."""

PPO_CLIPPED = ("ppo", "grpo", "dapo")
"""Methods that clip as PPO does, each with sides of its own."""

PUBLISHED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("estr", {"tau": tau}) for tau in (0.7, 1.0, 1.6)),
    ("ppo", {}),
    ("gspo", {}),
    *(("decoupled_masked", {"band": band}) for band in (1.003, 1.01, 1.03)),
    ("mis", {"level": "geometric"}),
    ("tis", {}),
    ("icepop", {}),
)
"""Methods whose thresholds are judged, with what differs from their defaults."""


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

    A clip counts tokens beyond either side, though it stops a token on one side only, by the sign of its advantage; a
    cap counts the tokens whose weight it lowers.
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


def noise_floor(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    behavior_entropy: Tensor,
    mask: Tensor,
    *,
    algorithm: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> NoiseFloor:
    """What the methods' thresholds would do to tokens of staleness 0.

    Args:
        logprobs, behavior_logprobs, behavior_entropy, mask: `[B, T]`; masked positions may hold NaN.
        algorithm, params: a method to judge by its own thresholds, where it is among those of `PUBLISHED`.

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
        cuts=_cuts(difference, behavior_entropy.double(), mask, algorithm, params or {}),
    )


def _bins(size: Tensor, entropy: Tensor) -> tuple[EntropyBin, ...]:
    inner = torch.tensor(ENTROPY_EDGES[1:-1], dtype=entropy.dtype, device=entropy.device)
    index = torch.bucketize(entropy, inner, right=True)
    bins = []
    for i, (low, high) in enumerate(pairwise(ENTROPY_EDGES)):
        inside = size[index == i]
        bins.append(EntropyBin(low, high if high < math.inf else None, len(inside) / len(size), *_spread(inside)))
    return tuple(bins)


def _cuts(
    difference: Tensor, entropy: Tensor, mask: Tensor, algorithm: str | None, params: Mapping[str, Any]
) -> tuple[Cut, ...]:
    """The published thresholds, save for `algorithm`, which is judged by its own."""
    kind = "ppo" if algorithm in PPO_CLIPPED else algorithm
    asked = [(method, changes, "") for method, changes in PUBLISHED if method != kind]
    if algorithm is not None and kind in _FLAGS:
        asked.insert(0, (algorithm, params, ", as configured"))
    cuts = []
    for method, changes, note in asked:
        settings = find_algorithm(method).resolve(changes)
        threshold, flag = _FLAGS["ppo" if method in PPO_CLIPPED else method](difference, entropy, mask, settings)
        cuts.append(Cut(method, threshold + note, float(flag.expand_as(mask)[mask].double().mean())))
    return tuple(cuts)


_Flagged = tuple[str, Tensor]
"""A threshold in words, and the bool `[B, T]` or `[B, 1]` of what lies beyond it."""


def _estr(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    return f"tau {p['tau']}", delta.square() / (entropy + p["entropy_floor"]) > p["tau"]


def _ppo(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    low, high = p["eps_low"], p["eps_high"]
    return f"clip {_sides(low, high)}, either side", _outside(delta, 1 - low, 1 + high)


def _gspo(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    low, high = p["eps_low"], p["eps_high"]
    return f"clip {_sides(low, high)} of responses", _outside(response_mean(delta, mask), 1 - low, 1 + high)


def _decoupled_masked(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    return f"band {p['band']}", _outside(delta, 1 / p["band"], p["band"])


def _mis(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    published_low, published_high = MIS_BOUNDS[p["level"]]
    low = published_low if p["low"] is None else p["low"]
    high = published_high if p["high"] is None else p["high"]
    return f"{p['level']} {low}–{high}", _outside(_at_level(delta, mask, p["level"]), low, high)


def _tis(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    return f"{p['level']} cap {p['cap']}", _outside(_at_level(delta, mask, p["level"]), 0.0, p["cap"])


def _icepop(delta: Tensor, entropy: Tensor, mask: Tensor, p: Mapping[str, Any]) -> _Flagged:
    return f"band {p['low']}–{p['high']}", _outside(delta, p["low"], p["high"])


_FLAGS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], _Flagged]] = {
    "estr": _estr,
    "ppo": _ppo,
    "gspo": _gspo,
    "decoupled_masked": _decoupled_masked,
    "mis": _mis,
    "tis": _tis,
    "icepop": _icepop,
}


def _outside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return (ratio < low) | (ratio > high)


def _at_level(delta: Tensor, mask: Tensor, level: str) -> Tensor:
    """δ of the token, or its sum or mean over the response."""
    if level == "token":
        return delta
    return response_sum(delta, mask) if level == "sequence" else response_mean(delta, mask)


def _sides(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}/{high:g}"


def _spread(size: Tensor) -> tuple[float, float, float]:
    """Mean, the value that 99 % do not exceed, and maximum; zeros when empty."""
    if not len(size):
        return 0.0, 0.0, 0.0
    return float(size.mean()), float(size.kthvalue(math.ceil(0.99 * len(size))).values), float(size.max())
