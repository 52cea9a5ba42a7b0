"""Learning rate as a pure function of the step, so that nothing about it needs saving."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (0-based): linear warm-up to `peak`, then the schedule down to 0 at `num_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * progress))
