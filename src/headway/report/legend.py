"""How runs and kinds of lines are told apart: a run by its color, a kind by its dash or symbol, each named once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.report.figures import Trace, faded

NO_RUN = "no run"
"""`legendgroup` of what belongs to no run, such as boundaries: drawn once, if the runs agree on it."""

_GRAY = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Look:
    """How one run appears."""

    color: str
    run: str
    """Empty when it is the only run of the page."""

    def name(self, label: str) -> str:
        """
        >>> Look("#000000", "grpo").name("token mean")
        'grpo · token mean'
        """
        return " · ".join(part for part in (self.run, label) if part)


def of_run(traces: Sequence[Trace], look: Look) -> list[Trace]:
    """Traces of one run beside those of others: named after it where the pointer is, absent from the legend."""
    if not look.run:
        return list(traces)
    return [
        trace
        if trace.get("legendgroup") == NO_RUN
        else trace | {"name": look.name(trace["name"]), "meta": trace["name"], "showlegend": False}
        for trace in traces
    ]


def legend(traces: Sequence[Trace]) -> list[Trace]:
    """The same traces, what belongs to no run once, and an empty gray one a kind of line where there are several."""
    kept: dict[Any, Trace] = {}
    kinds: dict[str, Trace] = {}
    for i, trace in enumerate(traces):
        kept.setdefault(trace["name"] if trace.get("legendgroup") == NO_RUN else i, trace)
        if trace.get("meta"):
            kinds.setdefault(trace["meta"], trace)
    return [*kept.values(), *(_sample(kind, trace) for kind, trace in kinds.items() if len(kinds) > 1)]


def _sample(kind: str, trace: Trace) -> Trace:
    style = {key: _gray(trace[key]) for key in ("line", "marker") if key in trace}
    return {"type": trace["type"], "x": [None], "y": [None], "name": kind, **style} | (
        {"mode": trace["mode"]} if "mode" in trace else {}
    )


def _gray(style: Any) -> Any:
    """A line's or marker's style without the color of its run."""
    if isinstance(style, dict):
        return {key: _gray(value) for key, value in style.items()}
    if isinstance(style, str) and style.startswith(("#", "rgba")):
        return _GRAY if style.startswith("#") else faded(_GRAY, 0.35)
    return style
