"""When a run counts as collapsed; one rule for studies and for the law."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

RULE = (
    "a run has collapsed when it ends below half of what it had (training reward, smoothed by a trailing mean of "
    "max(5, T/10) steps, below half of its own peak, or last held-out accuracy below half of its best), or when it "
    "stopped because gradients, parameters or outputs of the policy were not finite"
)


def collapsed_at(
    rewards: Sequence[float], scores: Mapping[int, float], *, num_steps: int, finished: bool
) -> int | None:
    """Step from which a run stays collapsed by RULE; None for one that held.

    `rewards`: of each step. `scores`: held-out accuracy by version. `finished`: False where gradients were not finite.
    """
    window = min(len(rewards), max(5, num_steps // 10))
    smooth = np.convolve(rewards, np.ones(window) / window, mode="valid") if window else np.empty(0)
    versions = sorted(scores)
    since = [
        _falls(smooth, lambda index: index + window - 1),
        _falls(np.array([scores[version] for version in versions]), lambda index: versions[index]),
        None if finished else len(rewards),
    ]
    return min((step for step in since if step is not None), default=None)


def _falls(values: NDArray[np.float64], step_of: Callable[[int], int]) -> int | None:
    """Where the stretch below half of the peak begins that lasts to the end; None without one.

    A peak at or below 0 has no half to fall under: rewards that are penalties alone never collapse by this rule.
    """
    peak = np.maximum.accumulate(values)
    low = (peak > 0) & (values < 0.5 * peak)
    if not low.size or not low[-1]:
        return None
    held = np.flatnonzero(~low)
    return step_of(int(held[-1]) + 1 if held.size else 0)
