"""What an algorithm declares about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from headway.algorithms.reduce import REDUCTIONS
from headway.errors import nearest

Need = Literal[
    "behavior_logprobs",
    "behavior_entropy",
    "proximal_logprobs",
    "whole_groups",
    "whole_batch",
    "response_advantages",
]
AdvantageName = Literal["grpo", "centered", "rloo"]

SCOPES = ("micro_batch", "batch")

POSITIVE = ("band", "cap", "l_max", "p_high", "p_low", "tau_neg", "tau_pos")
"""Parameters that are divided by, or whose logarithm is taken."""

LARGEST = 1e38
"""float32 holds little more: a larger finite number would fail in the loss, which names nothing."""

EXACT = 2**53
"""Up to here a float holds every integer; torch fails on those above 2^63, so larger ones are taken as floats."""

RANGES: Mapping[str, tuple[float, float]] = {
    "alpha": (0, LARGEST),
    "budget": (0, inf),
    "clip": (0, inf),
    "dual_clip": (1, inf),
    "entropy_floor": (0, inf),
    "eps": (0, inf),
    "eps_high": (0, inf),
    "eps_low": (0, inf),
    "exponent": (0, inf),
    "floor": (1e-30, inf),
    "p_high": (0, 1),
    "p_low": (0, 1),
    "quantile": (0, 1),
}
"""Where else a parameter means anything, both ends included; a `floor` below would be 0 in float32."""

BOUNDS = (("p_low", "p_high"), ("low", "high"))
"""Pairs of which the first may not exceed the second; one that is left open bounds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A loss and everything a run must know to feed it.

    Example: `ALGORITHMS["estr"].needs == {"behavior_logprobs", "behavior_entropy"}`
    """

    name: str
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    """`loss(logprobs, behavior_logprobs, advantages, mask, *, …) -> (token_loss [B, T], metrics)`."""
    advantage: AdvantageName = "grpo"
    reduction: str = "token_mean"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[Need]
    """`whole_groups`: no member may be missing; `response_advantages`: one value per response, no token credit."""
    statistics: Callable[..., dict[str, Tensor]] | None = None
    """Taken over the whole optimizer batch when `scope = "batch"`; its keys are keywords of `loss`."""
    paper: str
    """arXiv number, or where it was published."""
    summary: str

    def resolve(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid with `params`; `reduction` and `l_max` (for reduction `fixed`) are always among them.

        Raises:
            ValueError: a parameter this algorithm does not have, a value of the wrong kind or out of range, an unknown
                reduction or scope.
        """
        settings = overlay(self.name, {"reduction": self.reduction, "l_max": None, **self.defaults}, params)
        if settings["reduction"] not in REDUCTIONS:
            raise ValueError(f"unknown reduction {settings['reduction']!r}: choose one of {', '.join(REDUCTIONS)}")
        if settings.get("scope", "batch") not in SCOPES:
            raise ValueError(f"{self.name}: scope {settings['scope']!r} must be one of {', '.join(SCOPES)}")
        return settings

    def needs_for(self, params: Mapping[str, Any] | None = None) -> frozenset[Need]:
        """`needs`, and `whole_batch` when these parameters take a statistic over the whole optimizer batch."""
        scope = self.resolve(params or {}).get("scope")
        whole: frozenset[Need] = frozenset({"whole_batch"} if scope == "batch" else ())
        return self.needs | whole


def overlay(name: str, defaults: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults with `params` laid over them. Raises ValueError on one without a default, or of another kind than it."""
    for key, value in params.items():
        if key not in defaults:
            raise ValueError(f"{name} has no parameter {key!r}; {nearest(key, defaults)}")
        if wanted := _mismatch(key, value, defaults[key]):
            raise ValueError(f"{name}: {key} is {value!r}, but must be {wanted}")
    settings = {**defaults, **params}
    settings |= {key: float(v) for key, v in settings.items() if isinstance(v, int) and abs(v) > EXACT}
    for low, high in BOUNDS:
        if (least := settings.get(low)) is not None and (most := settings.get(high)) is not None and least > most:
            raise ValueError(f"{name}: {low} is {least!r}, above {high}, which is {most!r}: nothing lies between")
    return settings


def _mismatch(key: str, value: Any, default: Any) -> str | None:
    """What a value must be, where it is not. A default of None stands for a number that may be left open."""
    if isinstance(default, tuple):
        return _mismatch_in_list(key, value, default)
    if isinstance(default, bool | str):
        return None if isinstance(value, type(default)) else "true or false" if isinstance(default, bool) else "a name"
    if not (default is None or isinstance(default, Real)) or (value is None and default is None):
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or isnan(value):
        return "a number"
    number: Any = value  # numbers.Real declares no order against int and float
    if key in POSITIVE and not number > 0:
        return "a number above 0"
    low, high = RANGES.get(key, (-inf, inf))
    if not low <= number <= high:
        return f"from {low} to {high}"
    return f"a number within ±{LARGEST:g}, or inf" if abs(number) > LARGEST and number != inf else None


def _mismatch_in_list(key: str, values: Any, defaults: tuple[float, ...]) -> str | None:
    if not isinstance(values, list | tuple) or len(values) != len(defaults):
        return f"{len(defaults)} numbers, such as {list(defaults)}"
    wanted = (_mismatch(key, value, default) for value, default in zip(values, defaults, strict=True))
    return next((f"{len(defaults)} numbers, each {one}" for one in wanted if one), None)
