"""Plots that look inside a batch: staleness of tokens, |δ| by entropy and at version switches, quadrants."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.report.figures import HUES, QUADRANTS, Figure, Trace, axis, faded, line, steps_of
from headway.report.legend import NO_RUN, Look
from headway.report.plots import STEP_AXIS, Drawing, Line, Plot, lacks, over_steps
from headway.report.run_data import RunData

DECADES = [10.0**power for power in range(-9, 2)]
"""Ticks of logarithmic axes."""


def _ages(run: RunData, look: Look) -> Drawing:
    """Share of all trained tokens, and of all trained samples by their oldest token, at each staleness."""
    tokens: Counter[int] = Counter()
    for step in run.steps:
        tokens.update({int(age): num for age, num in (step.get("token_staleness") or {}).items()})
    if not tokens:
        return lacks(run, "token_staleness")
    traces = [_bars(tokens, "tokens", {"color": look.color})]
    if run.audit is not None and run.audit.sample_staleness:
        outline = {"color": faded(look.color, 0.35), "line": {"color": look.color, "width": 1.5}}
        traces.append(_bars(run.audit.sample_staleness, "samples", outline))
    return traces


def _bars(counts: Any, name: str, marker: dict[str, Any]) -> dict[str, Any]:
    total = sum(counts.values())
    ages = sorted(counts)
    shares = [counts[age] / total for age in ages]
    return {"type": "bar", "x": ages, "y": shares, "name": name, "marker": marker}


def _stopped(run: RunData, look: Look) -> Figure | str:
    """Stacked: which tokens the method cut, by sign of A and side of r = 1."""
    if not run.has("stopped_fraction"):
        return lacks(run, "stopped_fraction")
    x = steps_of(run)
    traces: list[Trace] = []
    for quadrant, label in QUADRANTS.items():
        fill = {"stackgroup": "stopped", "fillcolor": HUES[quadrant], "mode": "lines"}
        column = run.column(f"stopped_{quadrant}")
        traces.append(line(x, column, name=label, color=HUES[quadrant], width=0.5) | fill)
    if run.has("masked_fraction"):
        traces.append(line(x, run.column("masked_fraction"), name="masked by entropy", color="#555555", dash="dot"))
    return Figure(traces, {"xaxis": STEP_AXIS, "yaxis": axis("fraction of tokens")})


def _by_entropy(run: RunData, look: Look) -> Drawing:
    """Mean and 99 % of |δ| in every bin of entropy, over the newest half of the run."""
    found = [step["delta_by_entropy"] for step in run.steps if isinstance(step.get("delta_by_entropy"), dict)]
    if not found:
        return _not_profiled(run)
    newest = found[len(found) // 2 :]
    edges, delta_edges = newest[-1]["entropy_edges"], newest[-1]["delta_edges"]
    counts = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*_column(newest, "num"), strict=True)]
    sums = [sum(column) for column in zip(*_column(newest, "sum_abs_delta"), strict=True)]
    bins = [i for i, row in enumerate(counts) if sum(row)]
    x = [_center(edges, i) for i in bins]
    shares = [f"{sum(counts[i]) / sum(map(sum, counts)):.1%} of the tokens" for i in bins]
    mean = [sums[i] / sum(counts[i]) for i in bins]
    tail = [_quantile(delta_edges, counts[i], 0.99) for i in bins]
    marks = {"mode": "lines+markers", "text": shares}
    return [
        line(x, mean, name="mean |δ|", color=look.color) | marks,
        line(x, tail, name="99 % of |δ|", color=look.color, dash="dot") | marks,
        *_boundaries(newest[-1]),
    ]


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _center(edges: Sequence[float], i: int) -> float:
    low, high = edges[i], edges[i + 1] if i + 1 < len(edges) else 2 * edges[i]
    return math.sqrt(max(low, high / 10) * high)


def _quantile(edges: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Upper edge of the bin in which that share of the tokens is reached; of the last, open bin the lower edge."""
    reached = 0
    for i, count in enumerate(counts):
        reached += count
        if reached >= share * sum(counts):
            return edges[min(i + 1, len(edges) - 1)]
    return edges[-1]


def _boundaries(row: dict[str, Any]) -> list[dict[str, Any]]:
    """ESTR's boundary |δ| = √(τ·(H + ε)), and the fixed one |δ| = log(1 + clip), as it is at every entropy."""
    entropies = [10 ** (-4 + i / 10) for i in range(48)]
    tau, floor, clip = row["tau"], row["entropy_floor"], row["clip"]
    style = {"mode": "lines", "legendgroup": NO_RUN, "hoverinfo": "name"}
    estr = [math.sqrt(tau * (entropy + floor)) for entropy in entropies]
    return [
        line(entropies, estr, name=f"ESTR boundary, τ = {tau:g}", color="#c43c3c", dash="dash") | style,
        line(entropies, [math.log1p(clip)] * len(entropies), name=f"fixed boundary, log(1 + {clip:g})", color="#777777")
        | style,
    ]


def _not_profiled(run: RunData) -> str:
    if not run.steps:
        return "no step is on record yet"
    if not run.setting("engines.logprobs", True):
        return "engines.logprobs is off, so δ is unknown"
    return "the run was made without token profiles: report.profiles is off, or the engine reported no entropy"


def _at_switches(run: RunData, look: Look) -> Drawing:
    """Mean |δ| and mean behavior entropy around the first token of a newer version, over the whole run."""
    found = [step["delta_at_switches"] for step in run.steps if isinstance(step.get("delta_at_switches"), dict)]
    if not found:
        if run.steps and not run.has("mixed_version_fraction"):
            return _not_profiled(run)
        mixed = any(step.get("mixed_version_fraction") for step in run.steps)
        if mixed:
            return _not_profiled(run)
        return "no response held tokens of two versions" if run.steps else "no step is on record yet"
    num = [sum(column) for column in zip(*_column(found, "num"), strict=True)]
    seen = [i for i, count in enumerate(num) if count]
    offsets = [found[-1]["offsets"][i] for i in seen]

    def mean(key: str) -> list[float]:
        sums = [sum(column) for column in zip(*_column(found, key), strict=True)]
        return [sums[i] / num[i] for i in seen]

    text = [f"{num[i]:,} tokens" for i in seen]
    traces = [line(offsets, mean("sum_abs_delta"), name="mean |δ|", color=look.color) | {"text": text}]
    if "sum_entropy" in found[-1]:
        entropy = line(offsets, mean("sum_entropy"), name="entropy", color=look.color, dash="dot")
        traces.append(entropy | {"yaxis": "y2", "text": text})
    return traces


STALENESS: Sequence[Plot] = (
    over_steps(
        "staleness",
        "Staleness of tokens and samples",
        "Versions between sampling and training: mean and oldest token, and the mean over samples by oldest token.",
        Line("staleness_token_mean", "tokens, mean"),
        Line("staleness_sample_mean", "samples, mean", "dash"),
        Line("staleness_token_max", "tokens, max", "dot"),
        y="versions",
    ),
    Plot(
        key="ages",
        title="How old the data was, over the whole run",
        caption="Share of trained tokens, and of trained samples by their oldest token, at each staleness.",
        metrics=("token_staleness", "staleness_token_mean", "staleness_sample_mean"),
        draw=_ages,
        layout={
            "xaxis": axis("staleness, versions", rangemode="normal", dtick=1),
            "yaxis": axis("share", tickformat=".0%"),
        },
    ),
    over_steps(
        "spread",
        "Where the age comes from: D_intra and D_inter",
        "D_intra: versions that passed while a response was generated; D_inter: versions it then waited to be trained.",
        Line("d_intra", "D_intra"),
        Line("d_inter", "D_inter", "dash"),
        y="versions",
        also=("mixed_version_fraction",),
    ),
    Plot(
        key="switches",
        title="|δ| and entropy around version switches",
        caption="Tokens around new weights that arrived inside a response; 0 is the first token of the new version.",
        metrics=("delta_at_switches", "mixed_version_fraction"),
        draw=_at_switches,
        layout={
            "xaxis": axis("tokens from the switch", rangemode="normal", dtick=2),
            "yaxis": axis("mean |δ|, nats"),
            "yaxis2": axis("entropy, nats (dotted)", overlaying="y", side="right", showgrid=False, tickmode="auto"),
            "shapes": [
                {"type": "line", "x0": -0.5, "x1": -0.5, "y0": 0, "y1": 1, "yref": "paper"}
                | {"line": {"color": "#999999", "width": 1, "dash": "dash"}}
            ],
        },
    ),
)

BY_ENTROPY = Plot(
    key="by_entropy",
    title="|δ| by entropy of the token",
    caption="Newest half of the run; ESTR drops tokens above its boundary, a ratio clip looks at the fixed one.",
    metrics=("delta_by_entropy", "masked_fraction", "mean_abs_delta"),
    draw=_by_entropy,
    layout={
        "xaxis": axis("entropy of the policy that sampled, nats", type="log", range=[-3.2, 0.7], tickvals=DECADES),
        "yaxis": axis("|δ|, nats", type="log", rangemode="normal", tickvals=DECADES, tickformat="~g"),
    },
)

STOPPED = Plot(
    key="stopped",
    title="What the method cut, by quadrant",
    caption="Tokens without gradient: blue A > 0, orange A < 0; strong where the policy had already moved that way.",
    metrics=("stopped_fraction", "stopped_<quadrant>", "masked_fraction"),
    figure=_stopped,
)
