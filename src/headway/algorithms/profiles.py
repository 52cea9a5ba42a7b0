"""|δ| seen token by token: by the entropy it was sampled at, and around the switch to newer weights.

Counts and sums, never means, so that profiles of several steps add up. For the report; no loss reads them.
"""

import torch
from torch import Tensor

from headway.algorithms.ratios import log_ratio

ENTROPY_EDGES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
"""Lower edges of the bins, nats; the last bin is open."""

DELTA_EDGES = (0.0, *(10 ** (-3 + k / 4) for k in range(17)))
"""The same for |δ|: four bins a decade from 0.001 to 10."""

OFFSETS = range(-8, 9)
"""Sampled tokens from the first one of a newer version."""


def delta_by_entropy(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    behavior_entropy: Tensor,
    mask: Tensor,
    *,
    tau: float,
    entropy_floor: float,
    clip: float,
) -> dict[str, Tensor]:
    """Tokens by entropy H and |δ|, and how many lie beyond two boundaries.

    Args:
        logprobs, behavior_logprobs, behavior_entropy, mask: `[B, T]`.
        tau, entropy_floor: ESTR's boundary δ²/(H + ε) > τ (2607.22186).
        clip: the fixed one, |δ| > log(1 + clip).

    Returns:
        `num` `[len(ENTROPY_EDGES), len(DELTA_EDGES)]`; `sum_abs_delta`, `outside_estr` and `outside_clip`, a value a
        bin of entropy.
    """
    mask = mask.bool()
    size = log_ratio(logprobs.detach()[mask], behavior_logprobs[mask]).abs()
    entropy = behavior_entropy[mask]
    row = _bins(entropy, ENTROPY_EDGES)
    cell = row * len(DELTA_EDGES) + _bins(size, DELTA_EDGES)
    num = torch.bincount(cell, minlength=len(ENTROPY_EDGES) * len(DELTA_EDGES))

    def by_row(flag: Tensor) -> Tensor:
        return torch.bincount(row, weights=flag.double(), minlength=len(ENTROPY_EDGES))

    return {
        "num": num.view(len(ENTROPY_EDGES), len(DELTA_EDGES)),
        "sum_abs_delta": by_row(size),
        "outside_estr": by_row(size.square() / (entropy + entropy_floor) > tau).long(),
        "outside_clip": by_row(size > torch.log1p(torch.tensor(clip))).long(),
    }


def delta_at_switches(
    logprobs: Tensor, behavior_logprobs: Tensor, behavior_entropy: Tensor, versions: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """|δ| and entropy of sampled tokens at each of `OFFSETS` from every version switch; tool tokens do not count.

    Args:
        logprobs, behavior_logprobs, behavior_entropy, mask: `[B, T]`.
        versions: `[B, T]`; a switch is a sampled token of another version than the sampled token before it.

    Returns:
        `num`, `sum_abs_delta`, `sum_entropy`, each `[len(OFFSETS)]`; all 0 without a switch.
    """
    mask = mask.bool()
    response = mask.nonzero()[:, 0]
    version = versions[mask]
    same = response[1:] == response[:-1]
    switch = 1 + (same & (version[1:] != version[:-1])).nonzero().flatten()
    place = switch.unsqueeze(1) + torch.tensor(list(OFFSETS), device=switch.device)
    inside = place.clamp(0, max(0, len(response) - 1))
    there = (inside == place) & (response[inside] == response[switch].unsqueeze(1))
    size = log_ratio(logprobs.detach()[mask], behavior_logprobs[mask]).abs()

    def total(values: Tensor) -> Tensor:
        return torch.where(there, values[inside].double(), 0.0).sum(0)

    return {"num": there.sum(0), "sum_abs_delta": total(size), "sum_entropy": total(behavior_entropy[mask])}


def _bins(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Index of the bin [edge, next edge) of each value; what lies below the first edge counts in the first bin."""
    boundaries = torch.tensor(edges[1:], dtype=values.dtype, device=values.device)
    return torch.bucketize(values.contiguous(), boundaries, right=True)
