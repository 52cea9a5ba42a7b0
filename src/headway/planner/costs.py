"""What things take, in seconds. Every number is measured from a run or given; nothing here is a constant of nature."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_COST_S = 1e9
"""No cost is larger: beside 1e300 s a clock does not notice what is short, and the simulation would not end."""


def _not_negative(costs: Any) -> None:
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not 0 <= value <= MAX_COST_S:
            raise ValueError(f"{field.name} must be from 0 to {MAX_COST_S:g}, got {value}")


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """One decode step of n sequences that hold K cached tokens takes step_s + n·sequence_s + K·context_s.

    `step_s` is the memory-bound part (the weights are read once), `sequence_s` the compute-bound one, `context_s` the
    reading of keys and values.
    """

    step_s: float
    sequence_s: float
    context_s: float = 0.0
    prefill_s: float = 0.0
    """Per prompt token; decoding pauses meanwhile."""
    refill_s: float = 0.0
    """Of a pass that prefills whatever joins together, beside what its tokens cost; decoding pauses meanwhile."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if not self.step_s + self.sequence_s:
            raise ValueError("step_s and sequence_s are both 0: decoding would take no time")

    def times(self, factor: float) -> "EngineCosts":
        """Those of an engine that takes `factor` times as long for everything."""
        return EngineCosts(*(factor * getattr(self, field.name) for field in fields(self)))

    def decode_step(self, num_active: float, num_cached: float = 0.0) -> float:
        """Seconds of one decode step."""
        return self.step_s + num_active * self.sequence_s + num_cached * self.context_s


@dataclass(frozen=True, slots=True)
class LearnerCosts:
    """One optimizer step on n tokens (prompt and response) takes step_s + n·token_s / num_devices."""

    token_s: float
    step_s: float = 0.0
    """What does not shrink with more devices: collectives, the optimizer."""
    jitter: float = 0.0
    """Standard deviation ÷ mean of the time of steps of one size; log-normal, each step for itself."""

    def __post_init__(self) -> None:
        _not_negative(self)

    def train(self, num_tokens: float, num_devices: float) -> float:
        """Seconds of one optimizer step."""
        return self.step_s + num_tokens * self.token_s / num_devices


@dataclass(frozen=True, slots=True)
class SyncCosts:
    """How a version reaches the engines."""

    publish_s: float = 0.0
    """The learner writes and does nothing else."""
    transfer_s: float = 0.0
    """Engines go on with the previous version until it has arrived."""
    pause_s: float = 0.0
    """Every engine stands still while it loads."""
    spread_s: float = 0.0
    """Each engine takes a version at a moment of its own within this time."""
    patience_s: float = 5.0
    """How long the next version waits for all of them; after that for the first alone."""

    def __post_init__(self) -> None:
        _not_negative(self)


@dataclass(frozen=True, slots=True)
class ToolCosts:
    """Turns of an episode, and the log-normal time that the environment takes after each of them."""

    num_turns: int = 1
    latency_s: float = 0.0
    """Mean per turn."""
    sigma: float = 1.0
    """Of the logarithm; 1 gives one call in a hundred more than six means."""
    observation_tokens: int = 0
    """Shown after each turn but the last, prefilled with the whole context."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if self.num_turns < 1:
            raise ValueError(f"num_turns must be at least 1, got {self.num_turns}")


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """What learner, engines and controller cost each other on one machine; the defaults are separate machines."""

    engine_slowdown: float = 1.0
    """Decoding takes this many times longer while the learner trains."""
    learner_slowdown: float = 1.0
    """Training takes this many times longer while an engine decodes."""
    controller_s: float = 0.0
    """The controller's serial work per response."""
    issue_share: float = 0.5
    """Share of that work when the response is issued; the rest is as its turns end."""
    standstill: float = 0.4
    """Share of the controller's work for which the learner, in whose process it is, stands still. They take turns with
    one interpreter: that work takes 1 + standstill times as long meanwhile. Without a free core the learner loses all
    of it, for whoever wakes up goes first. (A thread that computes beside training: 0.26 to 0.46 with a free core.)"""
    num_cores: int = 0
    """Processor cores that busy engines and the training learner divide among them; 0: each has what it needs."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if min(self.engine_slowdown, self.learner_slowdown) < 1:
            raise ValueError(f"a slowdown is at least 1, got {self}")
        for name in ("issue_share", "standstill"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share, at most 1, got {getattr(self, name)}")

    def standstill_beside(self, num_engines: int) -> float:
        """The share while so many engines decode.

        >>> shared = SharedCosts(standstill=0.4, num_cores=2)
        >>> shared.standstill_beside(0), shared.standstill_beside(1)
        (0.4, 1.0)
        """
        return 1.0 if 0 < self.num_cores <= 1 + num_engines else self.standstill

    def crowding(self, num_busy: float) -> float:
        """How many times longer everything takes while `num_busy` of engines and learner compute.

        >>> SharedCosts(num_cores=2).crowding(3), SharedCosts(num_cores=2).crowding(1), SharedCosts().crowding(9)
        (1.5, 1.0, 1.0)
        """
        return max(1.0, num_busy / self.num_cores) if self.num_cores else 1.0


def fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Non-negative (intercept, slope) that minimize Σ w (y − intercept − slope·x)². Raises ValueError when empty."""
    root = np.sqrt(np.asarray(weights, float))
    intercept, slope = fit_costs(np.stack([root, root * np.asarray(x, float)], axis=1), root * np.asarray(y, float))
    return intercept, slope


def fit_costs(amounts: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Non-negative costs `[K]`, least squares of amounts `[N, K]` · costs ≈ seconds `[N]`. ValueError if N = 0."""
    from scipy.optimize import nnls

    if not len(seconds):
        raise ValueError("nothing to fit a cost to: no step was recorded")
    # Columns of like size: nnls is not invariant to scale.
    scale = np.maximum(amounts.mean(axis=0), 1e-12)
    costs, _ = nnls(amounts / scale, seconds)
    return (costs / scale).tolist()
