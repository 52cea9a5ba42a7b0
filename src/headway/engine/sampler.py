"""Drawing tokens: counter-based randomness, inverse CDF, and what the drawn distribution was.

Token t of a request is a function of (seed, t, distribution) alone: u = hash(seed, t, draw) in [0, 1), and the token is
the first whose cumulative probability exceeds u. Batch neighbors, slots and arrival times play no part.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_of(seed: int) -> np.uint64:
    """The random stream a seed names; any Python integer, taken modulo 2^64."""
    return _mix(np.array([seed & (2**64 - 1)], np.uint64))[0]


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64], num_draws: int = 0) -> NDArray[np.float64]:
    """`[n, 1 + num_draws]` in [0, 1): u = mix(mix(stream + position) + draw), splitmix64's finalizer.

    Column 0 belongs to the token itself, the others to extra draws.
    """
    counters = _mix(streams + positions.astype(np.uint64))[:, None] + np.arange(1 + num_draws, dtype=np.uint64)
    # 48 bits: u · total rounds to less than total, so a token of positive probability always answers.
    return (_mix(counters) >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Knobs:
    """How each of n rows is drawn. A tensor that is None is one that no row needs."""

    temperature: Tensor | None = None
    """`[n, 1]`, > 0; greedy rows have 1."""
    cut: "Cut | None" = None
    greedy: Tensor | None = None
    """`[n]` bool."""
    num_draws: int = 0
    num_top: int = 0
    entropy: bool = True


@dataclass(frozen=True, slots=True)
class Cut:
    """Which rows are truncated, and how."""

    rows: Tensor
    """`[c]`, indices into the n rows."""
    top_p: Tensor
    """`[c]`, 1 keeps all that top_k left."""
    top_k: Tensor
    """`[c]`, vocabulary size keeps all."""
    max_k: int
    """The largest of `top_k`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each of n rows, and its side data; an absent one is None."""

    token_ids: Tensor
    """`[n]`."""
    logprobs: Tensor
    """`[n]`, nats, float32."""
    entropy: Tensor | None = None
    """`[n]`, nats."""
    kept_mass: Tensor | None = None
    """`[n]`."""
    draw_ids: Tensor | None = None
    """`[n, m]`."""
    draw_logprobs: Tensor | None = None
    """`[n, m]`."""
    top_ids: Tensor | None = None
    """`[n, k]`, most likely first."""
    top_logprobs: Tensor | None = None
    """`[n, k]`, −inf beyond a truncated support."""

    def items(self) -> list[tuple[str, Tensor]]:
        """The fields that are present."""
        pairs = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in pairs if value is not None]


def sample(logits: Tensor, knobs: Knobs, u: Tensor) -> Sampled:
    """Draw one token a row from softmax(logits / temperature), cut to top-k and then top-p of what top-k left.

    logits `[n, V]`, u `[n, 1 + m]` float64 in [0, 1). Log-probs and entropy are float32, of the cut and renormalized
    distribution. A greedy row takes the most likely token, and reports the distribution at temperature 1: the point
    mass it was taken from says nothing.
    """
    logits = logits.float()
    best = logits.argmax(-1) if knobs.greedy is not None else None
    if knobs.temperature is not None:
        logits = logits / knobs.temperature
    logprobs, kept_mass = torch.log_softmax(logits, -1), None
    if (cut := knobs.cut) is not None:
        kept_mass = logprobs.new_ones(logprobs.shape[0])
        logprobs[cut.rows], kept_mass[cut.rows] = truncate(logprobs[cut.rows], cut.top_p, cut.top_k, cut.max_k)
    probs = logprobs.exp()
    drawn = draw(probs, u)
    tokens = drawn[:, 0] if best is None else torch.where(knobs.greedy, best, drawn[:, 0])  # type: ignore[arg-type]
    draws = drawn[:, 1 : 1 + knobs.num_draws] if knobs.num_draws else None
    top = logprobs.topk(knobs.num_top, -1) if knobs.num_top else None
    return Sampled(
        token_ids=tokens,
        logprobs=logprobs.gather(-1, tokens[:, None])[:, 0],
        entropy=_entropy(probs, logprobs, cut=kept_mass is not None) if knobs.entropy else None,
        kept_mass=kept_mass,
        draw_ids=draws,
        draw_logprobs=logprobs.gather(-1, draws) if draws is not None else None,
        top_ids=top.indices if top else None,
        top_logprobs=top.values if top else None,
    )


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: for probs `[n, V]` and u `[n, d]` the tokens `[n, d]`; probs need not sum to exactly 1."""
    # In float64 the running sum keeps the small probabilities of a large vocabulary apart.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    # Only rows that hold NaN reach V; their log-prob is NaN too, and the engine names them.
    return tokens.clamp_(max=probs.shape[-1] - 1)


def truncate(logprobs: Tensor, top_p: Tensor, top_k: Tensor, max_k: int) -> tuple[Tensor, Tensor]:
    """Keep the top_k most likely, then of these the fewest whose share reaches top_p; renormalize.

    logprobs `[n, V]`, top_p and top_k `[n]`, max_k ≥ every top_k. Returns log-probs `[n, V]`, −inf outside the support,
    and the probability `[n]` that the support had before. The most likely token always stays.
    """
    max_k = min(max_k, logprobs.shape[-1])
    likely, order = logprobs.topk(max_k, -1)
    within_k = torch.arange(max_k, device=logprobs.device) < top_k[:, None]
    probs = torch.where(within_k, likely.exp(), 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # A row with top_p = 1 keeps all: its share before the last tokens may round up to 1.
    below_p = (cumulative - probs < top_p[:, None] * cumulative[:, -1:]) | (top_p >= 1)[:, None]
    keep = within_k & below_p
    keep[:, 0] = True
    kept = torch.full_like(logprobs, -torch.inf).scatter_(-1, order, likely.masked_fill(~keep, -torch.inf))
    log_mass = kept.logsumexp(-1)
    return kept - log_mass[:, None], log_mass.exp()


def _entropy(probs: Tensor, logprobs: Tensor, *, cut: bool) -> Tensor:
    # 0 · −inf is NaN outside a cut support; without a cut every log-prob is finite.
    terms = probs * logprobs.clamp(min=-1e4) if cut else probs * logprobs
    return terms.sum(-1).neg_()
