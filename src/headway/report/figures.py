"""Plots as plain data: what plotly.js draws, without the Python side of plotly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.report.run_data import RunData

Trace = dict[str, Any]
Values = Sequence[float | None]

COLORS = ("#2f6fdb", "#d9730d", "#0f9d76", "#b5379e", "#c43c3c", "#6a5acd", "#7a8a00", "#0b8fb3")
"""One a run, the same in every plot."""

QUADRANTS = {
    "positive_up": "A>0, r>1",
    "positive_down": "A>0, r<1",
    "negative_up": "A<0, r>1",
    "negative_down": "A<0, r<1",
}
"""Sign of the advantage and side of the ratio, in words."""

HUES = {
    "positive_up": "#2f6fdb",
    "positive_down": "#9dbdf2",
    "negative_up": "#f3b98a",
    "negative_down": "#d9730d",
}
"""Quadrants: blue where A > 0, orange where A < 0; strong where the policy has already moved as the advantage asks."""

MAX_POINTS = 1500
"""Longer series are drawn as means of neighboring steps."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: traces and layout as plotly.js takes them; `height` in pixels."""

    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 340


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def faded(hexadecimal: str, alpha: float) -> str:
    """The color, that opaque.

    >>> faded("#102030", 0.5)
    'rgba(16,32,48,0.50)'
    """
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:.2f})"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that begins at 0, unless told otherwise.

    >>> axis("nats", type="log", rangemode="normal")
    {'title': {'text': 'nats'}, 'rangemode': 'normal', 'type': 'log'}
    """
    return {"title": {"text": title}, "rangemode": "tozero", **more}


def line(x: Values, y: Values, *, name: str, color: str, dash: str = "solid", width: float = 2, **more: Any) -> Trace:
    """A line that is thinned where it is long; `dash` tells the lines of one run apart."""
    x, y = thin(x, y)
    style = {"color": color, "dash": dash, "width": width}
    # A lone point would be invisible as a line.
    mode = "lines" if sum(value is not None for value in y) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "x": x, "y": y, "name": name, "line": style, **more}


def thin(x: Values, y: Values) -> tuple[list[float | None], list[float | None]]:
    """Means over equally long stretches, at most `MAX_POINTS` of them; None counts for nothing."""
    size = math.ceil(len(y) / MAX_POINTS)
    if size <= 1:
        return list(x), list(y)
    starts = range(0, len(y), size)
    return [_mean(x[i : i + size]) for i in starts], [_mean(y[i : i + size]) for i in starts]


def smooth(values: Values, window: int) -> list[float | None]:
    """Mean over the last `window` values that are there."""
    out: list[float | None] = []
    for end in range(1, len(values) + 1):
        out.append(_mean(values[max(0, end - window) : end]))
    return out


def _mean(values: Values) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def steps_of(run: RunData) -> list[float | None]:
    return [float(step["step"]) for step in run.steps]


def wall_clock_s(run: RunData) -> list[float | None]:
    """Seconds of training at every step, over all processes of a resumed run; a stop between them counts nothing.

    `elapsed_s` starts again in every process, and a step that is trained again has none: it keeps the time before it.
    """
    before = last = 0.0
    out: list[float | None] = []
    for elapsed in run.column("elapsed_s"):
        if elapsed is not None:
            before += last if elapsed < last else 0.0
            last = elapsed
        out.append(before + last)
    return out


def trained_tokens(run: RunData) -> list[float | None]:
    """Tokens trained up to and with every step."""
    total, out = 0.0, []
    for count in run.column("num_tokens"):
        total += count or 0.0
        out.append(total)
    return out


def at_versions(run: RunData, axis: Values, versions: Sequence[int]) -> list[float | None]:
    """Where on an axis of steps a policy version was reached: version v is what step v − 1 made, 0 the start."""
    reached = {int(step["step"]) + 1: value for step, value in zip(run.steps, axis, strict=True)}
    return [reached.get(version, 0.0 if version == 0 else None) for version in versions]


def clean(value: Any) -> Any:
    """The same data as strict JSON can hold it: NaN and infinity become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
