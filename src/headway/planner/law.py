"""The staleness–learning-rate law (2607.01083), fitted to one's own runs.

    η_max(S, T) = min(a / S, b / T)

S is the bound on staleness, T the number of steps. a/S is what stale rollouts allow (the bias of a stale gradient grows
as S·η), b/T what the horizon allows (the drift grows as T·η). The constants belong to model, task and algorithm and do
not transfer, so none is written here: they come from a grid of runs, each stable or collapsed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.planner.collapse import collapsed_at

SHARPNESS = tuple(np.geomspace(2.0, 40.0, 8))
"""Slopes of the collapse probability in log η that a fit considers; data that separate perfectly take the last."""

EXPONENTS = np.linspace(0.0, 2.0, 17)
"""Exponents of S, and of T, that a fit holds against the law's 1."""

SUPPORTED = 3.84
"""Likelihood-ratio statistic of one constraint at the 5 % level."""

Axis = Literal["max_staleness", "num_steps"]

_LAW: dict[str, float] = {"max_staleness": 1.0, "num_steps": 1.0}
"""Exponents of S and T."""

_GRID = 121
_REACH = 30.0
"""How far beyond the sweep's own S·η and T·η the constants are looked for, as a factor."""


class NotIdentified(ValueError):
    """The sweep cannot say what was asked; the message says which runs would."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep."""

    max_staleness: int
    lr: float
    num_steps: int
    collapsed: bool
    collapsed_at: int | None = None
    """Step from which the run stays collapsed."""
    mean_staleness: float | None = None
    """Of samples, as measured; well below `max_staleness` when the engines did not fill the bound."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its profile-likelihood interval; None where the data do not bound that side."""

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted law. `a` bounds S·η, `b` bounds T·η."""

    a: Interval
    b: Interval
    sharpness: float
    """Slope of the log-odds of collapse in log η."""
    level: float
    """Of the intervals."""
    staleness_matters: float
    """Likelihood-ratio statistic against b alone; above 3.84 the data support a constraint by S at the 5 % level."""
    horizon_matters: float
    """The same against a alone."""
    cells: tuple[Cell, ...]
    exponent: Interval | None = None
    """p of η ∝ 1/S^p, profiled between 0 and 2; the law says 1. None where fewer than two bounds above 0 were swept."""
    exponent_differs: float = 0.0
    """Likelihood-ratio statistic of the best p against 1; above 3.84 the border does not fall as 1/S."""
    horizon_exponent: Interval | None = None
    """q of η ∝ 1/T^q, likewise. None where one length was swept."""
    horizon_exponent_differs: float = 0.0

    def max_lr(self, max_staleness: int, num_steps: int) -> float:
        """η_max at the estimates."""
        return _limit(self.a.estimate, self.b.estimate, max_staleness, num_steps)

    def recommend(self, max_staleness: int, num_steps: int) -> float:
        """η_max at the lower ends of the intervals. Raises NotIdentified where one is open."""
        needed = {"b": self.b} | ({"a": self.a} if max_staleness else {})
        for name, interval in needed.items():
            if name == "a" and not any(cell.max_staleness for cell in self.cells):
                raise NotIdentified("the sweep has no bound above 0, so it says nothing of staleness: add some")
            if interval.low is None:
                raise NotIdentified(
                    f"the sweep does not bound {name} from below: add runs with smaller learning rates that stay stable"
                )
        return _limit(self.a.low or 0.0, self.b.low or 0.0, max_staleness, num_steps)

    def binding(self, max_staleness: int, num_steps: int) -> Literal["staleness", "horizon"]:
        """Which of the two constraints `recommend` takes: the tighter one, at the lower ends where there are any."""
        a, b = (side.estimate if side.low is None else side.low for side in (self.a, self.b))
        return "staleness" if max_staleness > 0 and a / max_staleness < b / num_steps else "horizon"

    def doubts(self, max_staleness: int, num_steps: int) -> list[str]:
        """Why `recommend` may be wrong at this bound and length: a rejected slope, and what lies outside the sweep."""
        found = []
        binding = self.binding(max_staleness, num_steps)
        evidence = {"staleness": self.staleness_matters, "horizon": self.horizon_matters}[binding]
        if evidence <= SUPPORTED:
            found.append(f"these runs do not support the constraint that binds, {binding} (2Δℓ = {evidence:.1f})")
        slopes = [("S", "p", "bounds", self.exponent, self.exponent_differs)] if max_staleness else []
        if binding == "horizon":
            slopes.append(("T", "q", "lengths", self.horizon_exponent, self.horizon_exponent_differs))
        for axis, letter, swept, exponent, differs in slopes:
            if exponent is not None and differs > SUPPORTED:
                less, more = ("below", "above") if exponent.estimate < 1 else ("above", "below")
                about = f"{letter} about {exponent.estimate:.2g}, 2Δℓ = {differs:.1f}"
                found.append(
                    f"the sweep rejects the law's 1/{axis} ({about}): {less} the swept {swept} the law allows too "
                    f"much, {more} them less than it could"
                )
        asked = {"max_staleness": (max_staleness, "1/S")} if max_staleness else {}
        asked["num_steps"] = (num_steps, "1/T")
        for name, (value, slope) in asked.items():
            swept = sorted({n for cell in self.cells if (n := getattr(cell, name))})
            if swept and not swept[0] <= value <= swept[-1]:
                found.append(f"{name} = {value} lies outside the sweep ({_range(swept)}): extrapolated as {slope}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Law":
        """Raises msgspec.ValidationError (a ValueError) where a field is missing or of another type."""
        return msgspec.convert(values, cls)


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _limit(a: float, b: float, max_staleness: int, num_steps: int) -> float:
    return min(a / max_staleness, b / num_steps) if max_staleness else b / num_steps


def fit(cells: Sequence[Cell], *, level: float = 0.95) -> Law:
    """Maximum likelihood over the cells, with profile-likelihood intervals.

    P(collapse) = σ(k · (log η − log η_max(S, T))): k > 0 allows that runs near the border fall either way. a, b and k
    are profiled on a grid that reaches 30 times beyond the sweep on both sides, then refined.
    Raises NotIdentified when all cells are stable or all collapsed.
    """
    from scipy.stats import chi2

    if not any(c.collapsed for c in cells) or all(c.collapsed for c in cells):
        kind = "collapsed" if any(c.collapsed for c in cells) else "stayed stable"
        mend = "smaller" if kind == "collapsed" else "larger"
        raise NotIdentified(f"all {len(cells)} runs {kind}, so no border shows; sweep {mend} learning rates")
    log_a, log_b = _axes(cells)
    surface = _surface(cells, log_a, log_b)
    best, sharpness = _refine(cells, log_a, log_b, surface)
    top = max(float(surface.max()), -best.fun)
    drop = float(chi2.ppf(level, 1)) / 2
    exponent, differs = _exponent("max_staleness", cells, log_a, log_b, drop)
    horizon_exponent, horizon_differs = _exponent("num_steps", cells, log_a, log_b, drop)
    return Law(
        a=_interval(np.exp(best.x[0]), np.exp(log_a), surface.max(axis=1) >= top - drop),
        b=_interval(np.exp(best.x[1]), np.exp(log_b), surface.max(axis=0) >= top - drop),
        sharpness=sharpness,
        level=level,
        staleness_matters=2 * (top - float(surface[-1].max())),
        horizon_matters=2 * (top - float(surface[:, -1].max())),
        cells=tuple(cells),
        exponent=exponent,
        exponent_differs=differs,
        horizon_exponent=horizon_exponent,
        horizon_exponent_differs=horizon_differs,
    )


def _surface(
    cells: Sequence[Cell], log_a: NDArray[np.float64], log_b: NDArray[np.float64], exponents: Mapping[str, float] = _LAW
) -> NDArray[np.float64]:
    """Log-likelihood `[a, b]` at the best slope."""
    found = [_log_likelihood(cells, log_a[:, None], log_b[None, :], k, exponents) for k in SHARPNESS]
    return np.max(found, axis=0)


def _exponent(
    axis: Axis, cells: Sequence[Cell], log_a: NDArray[np.float64], log_b: NDArray[np.float64], drop: float
) -> tuple[Interval | None, float]:
    """How fast the border falls with S or T, and how far that is from 1, the other as the law says.

    A plateau, as runs that separate perfectly leave, is taken at its middle.
    """
    if len({value for c in cells if (value := getattr(c, axis))}) < 2:
        return None, 0.0
    # Every third value is fine enough here, and nine times cheaper.
    profile = np.array([_surface(cells, log_a[::3], log_b[::3], _LAW | {axis: p}).max() for p in EXPONENTS])
    middle = float(EXPONENTS[profile >= profile.max() - 0.05].mean())
    differs = 2 * float(profile.max() - profile[EXPONENTS == 1].item())
    return _interval(middle, EXPONENTS, profile >= profile.max() - drop), differs


def _axes(cells: Sequence[Cell]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    stale = [c.max_staleness * c.lr for c in cells if c.max_staleness] or [c.lr for c in cells]
    drift = [c.num_steps * c.lr for c in cells]
    log_a, log_b = (
        np.linspace(np.log(min(products) / _REACH), np.log(max(products) * _REACH), _GRID)
        for products in (stale, drift)
    )
    return log_a, log_b


def _log_likelihood(
    cells: Sequence[Cell],
    log_a: NDArray[np.float64],
    log_b: NDArray[np.float64],
    sharpness: float,
    exponents: Mapping[str, float] = _LAW,
) -> NDArray[np.float64]:
    """Σ log P(outcome), broadcast over the constants. Borders of all exponents meet at the middle of the sweep."""
    middle = {axis: np.mean([np.log(n) for c in cells if (n := getattr(c, axis))] or [0.0]) for axis in exponents}

    def fall(axis: Axis, value: int) -> float:
        return float(middle[axis] + exponents[axis] * (np.log(value) - middle[axis]))

    total = np.zeros(np.broadcast_shapes(log_a.shape, log_b.shape))
    alike = Counter((c.max_staleness, c.num_steps, c.lr, c.collapsed) for c in cells)  # seeds differ in nothing else
    for (max_staleness, num_steps, lr, collapsed), number in alike.items():
        border = log_b - fall("num_steps", num_steps)
        if max_staleness:
            border = np.minimum(log_a - fall("max_staleness", max_staleness), border)
        odds = sharpness * (np.log(lr) - border)
        total = total - number * np.logaddexp(0, -odds if collapsed else odds)
    return total


def _refine(cells: Sequence[Cell], log_a: Any, log_b: Any, surface: NDArray[np.float64]) -> tuple[Any, float]:
    """Nelder–Mead from the middle of the best cells of the grid, for the best slope."""
    from scipy.optimize import minimize

    # The middle of the plateau: where a constraint binds nowhere, its likelihood is flat.
    plateau = np.argwhere(surface >= surface.max() - 1e-3)
    start = np.array([log_a[plateau[:, 0]].mean(), log_b[plateau[:, 1]].mean()])
    found = []
    for k in SHARPNESS:
        result = minimize(lambda x, k=k: -float(_log_likelihood(cells, x[0], x[1], k)), start, method="Nelder-Mead")
        found.append((result.fun, float(k), result))
    _, sharpness, best = min(found, key=lambda item: item[0])
    return best, sharpness


def _interval(estimate: float, values: NDArray[np.float64], inside: NDArray[np.bool_]) -> Interval:
    """One grid value beyond those inside, so that rounding never narrows it; a side at the grid's end is open."""
    kept = np.flatnonzero(inside)
    first, last = (kept[0] - 1, kept[-1] + 1) if len(kept) else (-1, len(values))
    low = None if first < 0 else float(min(values[first], estimate))
    high = None if last >= len(values) else float(max(values[last], estimate))
    return Interval(float(estimate), low, high)


def classify(rewards: Sequence[float], scores: Mapping[int, float], cell: Cell, *, finished: bool) -> Cell:
    """The cell with its verdict by the rule of `headway.planner.collapse`."""
    at = collapsed_at(rewards, scores, num_steps=cell.num_steps, finished=finished)
    return replace(cell, collapsed=at is not None, collapsed_at=at)
