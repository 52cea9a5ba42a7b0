"""What an algorithm declares about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

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
            ValueError: a parameter this algorithm does not have, or an unknown scope.
        """
        settings = overlay(self.name, {"reduction": self.reduction, "l_max": None, **self.defaults}, params)
        if settings.get("scope", "batch") not in SCOPES:
            raise ValueError(f"{self.name}: scope {settings['scope']!r} must be one of {', '.join(SCOPES)}")
        return settings

    def needs_for(self, params: Mapping[str, Any] | None = None) -> frozenset[Need]:
        """`needs`, and `whole_batch` when these parameters take a statistic over the whole optimizer batch."""
        scope = self.resolve(params or {}).get("scope")
        whole: frozenset[Need] = frozenset({"whole_batch"} if scope == "batch" else ())
        return self.needs | whole


def overlay(name: str, defaults: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults with `params` laid over them. Raises ValueError on a parameter that has no default."""
    for key in params:
        if key not in defaults:
            raise ValueError(f"{name} has no parameter {key!r}; {nearest(key, defaults)}")
    return {**defaults, **params}
