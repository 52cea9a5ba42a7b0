"""`ewma`: an average of the parameters stands for the policies that sampled (PPO-EWMA, 2110.00641 and 2605.12070)."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from headway.algorithms.proximal import ewma_restarts
from headway.protocols import Finished
from headway.proximal.averages import ParameterAverage
from headway.proximal.samples import complete, fill, samples_of
from headway.proximal.scorer import Scorer
from headway.proximal.source import Metrics
from headway.staleness import token_staleness
from headway.types import Batch, StepReport

FILE = "average.safetensors"

Window = Literal["max_staleness", "observed", "fixed"]


class AverageSource:
    """Averages the parameters after every update and scores each batch under the average, in one forward pass.

    θ_0 is the first thing averaged, since version 0 samples too. A step whose active fraction (tokens that neither the
    discrepancy mask nor the clip stopped; a clip stops none of A = 0) falls below `reset_below` restarts the average at
    the parameters it made.

    `window`: W in updates, β = W/(W + 2); None takes it from each batch, twice the mean staleness of its tokens: the
    mean age of what is averaged is W/2.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        window: float | None,
        reset_below: float,
        parameters: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._scorer, self._parameters = scorer, parameters
        self._observed = window is None
        self._reset_below = reset_below
        self._average = ParameterAverage(window or 0.0)
        self._average.reset(parameters())
        self._metrics: dict[str, float] = {}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The average."""
        return self._average.parameters

    def complete(self, batch: Batch) -> Batch:
        """Scores of an earlier attempt at a step count for nothing: they were taken under another average."""
        begun = time.monotonic()
        samples = samples_of(batch.groups)
        for sample in samples:
            sample.scores[:] = np.nan
        num_rows = fill(samples, self._scorer, self._average.parameters)
        self._metrics = {
            "proximal_s": time.monotonic() - begun,
            "proximal_shards": 1.0,
            "proximal_rows": float(num_rows),
        }
        return complete(batch, samples)

    def before_step(self, version: int) -> list[Finished]:
        return []

    def after_step(self, batch: Batch, report: StepReport) -> Metrics:
        """Take in the new parameters, or restart from them."""
        begun = time.monotonic()
        active = 1.0 - report.metrics["stopped_fraction"]
        restarts = ewma_restarts(active, self._reset_below)
        window = observed_window(batch) if self._observed else None
        if restarts:
            self._average.reset(self._parameters())
        else:
            self._average.update(self._parameters(), window=window)
        metrics, self._metrics = self._metrics, {}
        return {
            **metrics,
            "proximal_keep_s": time.monotonic() - begun,
            "proximal_bytes": float(sum(t.nbytes for t in self._average.parameters.values())),
            "proximal_active_fraction": active,
            "proximal_reset": float(restarts),
            "proximal_window": self._average.window if window is None else window,
        }

    def save(self, directory: Path) -> None:
        self._average.save(directory / FILE)

    def load(self, directory: Path) -> None:
        device = next(iter(self._average.parameters.values())).device
        self._average.load(directory / FILE, device=str(device))


def observed_window(batch: Batch) -> float:
    """2 · mean staleness of the tokens that train, in versions."""
    ages = np.concatenate([token_staleness(r.versions[r.mask], batch.policy_version) for r in batch.responses])
    return 2 * float(ages.mean()) if len(ages) else 0.0


def window_of(kind: Window, *, max_staleness: int, decay: float) -> float | None:
    """W for `AverageSource`: the configured bound, each batch's own (None), or that of a fixed β = `decay`."""
    match kind:
        case "max_staleness":
            return float(max_staleness)
        case "observed":
            return None
        case "fixed":
            return 2 * decay / (1 - decay)  # β = W/(W + 2) solved for W
