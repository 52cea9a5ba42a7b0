"""The token profiles that a step report carries, as plain data."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headway.algorithms.profiles import DELTA_EDGES, ENTROPY_EDGES, OFFSETS, delta_at_switches, delta_by_entropy
from headway.training.batching import Rows


def token_profiles(rows: Rows, logprobs: Tensor, *, tau: float, entropy_floor: float, clip: float) -> dict[str, Any]:
    """`delta_by_entropy`, and `delta_at_switches` where a response of the batch holds tokens of several versions.

    Empty when the engine reported no log-probs or no entropy. `logprobs`: `[B, S]` of the policy being trained.
    """
    if rows.behavior_logprobs is None or rows.behavior_entropy is None or not rows.mask.any():
        return {}
    given = logprobs, rows.behavior_logprobs, rows.behavior_entropy
    boundaries = {"tau": tau, "entropy_floor": entropy_floor, "clip": clip}
    by_entropy = delta_by_entropy(*given, rows.mask, **boundaries)
    edges = {"entropy_edges": list(ENTROPY_EDGES), "delta_edges": [float(f"{edge:.4g}") for edge in DELTA_EDGES]}
    found: dict[str, Any] = {"delta_by_entropy": edges | boundaries | _plain(by_entropy)}
    at_switches = delta_at_switches(*given, rows.versions, rows.mask)
    if at_switches["num"].any():
        found["delta_at_switches"] = {"offsets": list(OFFSETS), **_plain(at_switches)}
    return found


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, list]:
    """Lists, with as many digits as a plot can show."""
    return {name: _short(tensor.tolist()) for name, tensor in tensors.items()}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
