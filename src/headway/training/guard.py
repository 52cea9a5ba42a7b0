"""Watches a run for the signs that come before collapse, and on request lowers the learning rate or the bound.

Pure: what it says at step t follows from the metrics of steps ≤ t alone, so a resumed or replayed run decides the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

Action = Literal["warn", "lower_lr", "lower_staleness"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a sign, as means over `window` steps."""

    window: int = 10
    cosine: float = 0.5
    """cos(g_t, g_{t−1}) above it: consecutive updates push the same way (2607.01083)."""
    ess: float = 0.3
    """`ess_tokens` below it: few tokens carry the batch."""
    k3: float = 0.1
    """`k3_behavior_policy` above it, nats: the policy has left the data."""
    budget: float = 0.0
    """Largest S·η that the fitted law allows; 0 where no law was fitted."""


class Guard:
    """Takes the metrics of each step; says which signs stand, and what to do.

    After an action it waits for one window of new steps, so that what the action changed can show.
    `max_staleness`: the run's bound. `factor`: what one action multiplies the learning rate or the bound by.
    """

    def __init__(self, limits: Limits, *, action: Action, max_staleness: int, factor: float = 0.5) -> None:
        if not 0 < factor < 1 or limits.window < 1:
            raise ValueError(f"needs 0 < factor < 1 and window ≥ 1, got {factor} and {limits.window}")
        self._limits, self._action, self._factor = limits, action, factor
        self.lr_scale = 1.0
        """Multiplies the scheduled learning rate."""
        self.max_staleness = self._first_bound = max_staleness
        """The bound in force; only ever lowered."""
        self._seen: list[dict[str, float]] = []

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take one step's metrics; returns `guard_…` metrics, documented in docs/metrics.md."""
        names = ("grad_cosine", "ess_tokens", "k3_behavior_policy", "learning_rate")
        self._seen.append({name: metrics[name] for name in names if name in metrics})
        self._seen = self._seen[-self._limits.window :]
        signs = self.signs() if len(self._seen) == self._limits.window else []
        if signs and self._action != "warn":
            self._act()
            self._seen = []
        return {
            "guard_signs": float(sum(1 << SIGNS.index(sign) for sign in signs)),
            "guard_lr_scale": self.lr_scale,
            "guard_max_staleness": float(self.max_staleness),
        }

    def signs(self) -> list[str]:
        """Names of the signs that stand over the last window."""
        limits = self._limits
        product = self._mean("learning_rate", 0.0) * self.max_staleness
        stands = {
            "cosine": self._mean("grad_cosine", 0.0) > limits.cosine,
            "ess": self._mean("ess_tokens", 1.0) < limits.ess,
            "k3": self._mean("k3_behavior_policy", 0.0) > limits.k3,
            # A tolerance for rounding: a rate that the law itself set is within the budget.
            "budget": limits.budget > 0 and product > limits.budget * (1 + 1e-6),
        }
        return [name for name, standing in stands.items() if standing]

    def _mean(self, name: str, absent: float) -> float:
        values = [seen[name] for seen in self._seen if name in seen]
        return fmean(values) if values else absent

    def _act(self) -> None:
        if self._action == "lower_staleness" and self.max_staleness > 0:
            self.max_staleness = int(self.max_staleness * self._factor)
        else:
            self.lr_scale *= self._factor

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint: JSON data that `restore` takes up."""
        bound = {"max_staleness": self.max_staleness} if self.max_staleness < self._first_bound else {}
        return {"lr_scale": self.lr_scale, "seen": self._seen, **bound}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.lr_scale = state["lr_scale"]
        # Only a bound that was lowered stands: otherwise a resumed run may have a larger one.
        self.max_staleness = min(self.max_staleness, state.get("max_staleness", self.max_staleness))
        self._seen = [dict(seen) for seen in state["seen"]]


def stored_bound(checkpoint: Path, max_staleness: int) -> int:
    """The bound that the guard of a checkpoint had lowered the run to; `max_staleness` where it had not."""
    file = checkpoint / "guard.json"
    state = json.loads(file.read_text()) if file.is_file() else {}
    return min(max_staleness, state.get("max_staleness", max_staleness))


SIGNS = ("cosine", "ess", "k3", "budget")

_MEANING = {
    "cosine": "consecutive gradients point the same way (grad_cosine)",
    "ess": "few tokens carry the batch (ess_tokens)",
    "k3": "the policy has left its data (k3_behavior_policy)",
    "budget": "max_staleness · learning rate is above what the fitted law allows",
}


def explain(metrics: Mapping[str, float]) -> str | None:
    """What the guard's metrics of one step say, for a person; None when no sign stands."""
    bits = int(metrics.get("guard_signs", 0))
    standing = [_MEANING[name] for i, name in enumerate(SIGNS) if bits >> i & 1]
    if not standing:
        return None
    return (
        f"signs of collapse: {'; '.join(standing)}. Learning-rate scale {metrics['guard_lr_scale']:g}, "
        f"bound {metrics['guard_max_staleness']:g}; lower optimizer.lr or max_staleness, or set guard.action"
    )
