"""Averages of parameters over training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.algorithms.proximal import ewma_beta, ewma_step


class ParameterAverage:
    """Bias-corrected moving average of parameters, the proximal policy of PPO-EWMA (2110.00641).

    `w ← 1 + β w`, `average ← θ / w + β (w_prev / w) average`, `β = W / (W + 2)` for a window of W updates: the mean
    age of what is averaged is W/2. The first update returns θ itself. Held in the parameters' own dtype and device;
    no gradient.

    Example: `average = ParameterAverage(window=6); average.update(named_weights(model))`
    """

    def __init__(self, window: float) -> None:
        if window < 0:
            raise ValueError(f"the window of a parameter average must be ≥ 0 updates, got {window}")
        self.window = window
        self._beta = ewma_beta(window)
        self._weight = 0.0
        self._average: dict[str, Tensor] = {}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The average; empty before the first update."""
        return self._average

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], *, window: float | None = None) -> Mapping[str, Tensor]:
        """Take in θ after an optimizer step, by a window of this update's own if one is given.

        Raises ValueError when its names are not those averaged so far.
        """
        if not self._average:
            return self.reset(parameters)
        if parameters.keys() != self._average.keys():
            strangers = sorted(parameters.keys() ^ self._average.keys())
            raise ValueError(f"averaged and given parameters differ in {strangers[:3]}: `reset` first")
        step = ewma_step(self._weight, self._beta if window is None else ewma_beta(window))
        self._weight = step.weight
        for name, value in parameters.items():
            self._average[name].lerp_(value, step.theta_share)
        return self._average

    @torch.no_grad()
    def reset(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Forget the past: the average becomes θ, w becomes 1."""
        self._weight = 1.0
        self._average = {name: value.detach().clone() for name, value in parameters.items()}
        return self._average

    def save(self, file: str | Path) -> None:
        """Write average and w as safetensors."""
        save_file(self._average, file, metadata={"weight": repr(self._weight), "beta": repr(self._beta)})

    def load(self, file: str | Path, device: str = "cpu") -> None:
        """Take up what `save` wrote. Raises ValueError when it was averaged over another window."""
        with safe_open(file, framework="pt", device=device) as saved:
            metadata = saved.metadata()
            if float(metadata["beta"]) != self._beta:
                raise ValueError(f"{file} was averaged with β = {metadata['beta']}, this run has β = {self._beta}")
            self._weight = float(metadata["weight"])
            self._average = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
