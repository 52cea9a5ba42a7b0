"""Plots of the machine and of the accounts: who worked when, and where every token went."""

from collections.abc import Sequence
from typing import Any

from headway.accounts import Audit
from headway.report.figures import Figure, axis, faded
from headway.report.legend import Look
from headway.report.plots import Plot
from headway.report.run_data import RunData

MAX_SPANS = 2500
"""The timeline holds the newest ones."""

OPEN_ON = 20
"""Steps it opens on; a step trains in two spans."""

WORK = {
    "train": ("learner trains", "#2f6fdb"),
    "proximal": ("proximal log-probs", "#6a5acd"),
    "publish": ("publish weights", "#0b8fb3"),
    "checkpoint": ("checkpoint", "#7a8a00"),
    "decode": ("engine decodes (darker: busier)", "#0f9d76"),
    "sync": ("new weights on their way", "#d9730d"),
    "interrupted": ("interrupted for new weights", "#c43c3c"),
    "down": ("engine down", "#3a3a3a"),
    "evaluation": ("evaluation", "#b5379e"),
    "wait": ("waits", "#d5d9e0"),
}
"""Kind of span to its name in the legend, and its color."""

FATE_COLORS = {"trained": "#0f9d76", "masked": "#6a5acd", "dropped": "#c43c3c", "in flight": "#9aa3b2"}


def _timeline(run: RunData, look: Look) -> Figure | str:
    """One bar a span, one row a worker, seconds from the first span shown."""
    if not run.spans:
        return "timeline.jsonl is missing or empty: the run was made with report.timeline off, or before there was one"
    spans = sorted(run.spans, key=lambda span: span["start"])[-MAX_SPANS:]
    begun = spans[0]["start"]
    traces = []
    for what, (label, color) in WORK.items():
        chosen = [span for span in spans if span["what"] == what]
        # The legend takes the color of the first bar.
        chosen.sort(key=lambda span: -span.get("share", 1.0))
        if chosen:
            traces.append(_bars(chosen, begun, label, color))
    lanes = sorted({span["lane"] for span in spans}, key=_lane_order, reverse=True)
    steps = [span["start"] - begun for span in spans if span["what"] == "train"][-2 * OPEN_ON :]
    newest = {"range": [steps[0], spans[-1]["end"] - begun]} if steps else {}
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": axis("", rangemode="normal", ticksuffix=" s", **newest),
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": lanes, "automargin": True},
        "hovermode": "closest",
    }
    return Figure(traces, layout, height=170 + 42 * len(lanes))


def _bars(spans: Sequence[dict[str, Any]], begun: float, label: str, color: str) -> dict[str, Any]:
    shares = [span.get("share") for span in spans]
    colors = [color if share is None else faded(color, 0.08 + 0.92 * share) for share in shares]
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": [span["lane"] for span in spans],
        "base": [span["start"] - begun for span in spans],
        "x": [span["end"] - span["start"] for span in spans],
        "text": [_told(span) for span in spans],
        "textposition": "none",
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "marker": {"color": colors, "line": {"width": 0}},
    }


def _told(span: dict[str, Any]) -> str:
    facts = [f"{name} {value}" for name, value in span.items() if name not in ("lane", "what", "start", "end", "share")]
    busy = [f"{span['share']:.0%} busy"] if "share" in span else []
    return ", ".join([span["what"], f"{span['end'] - span['start']:.3f} s", *busy, *facts])


def _lane_order(lane: str) -> tuple[int, str]:
    order = ("learner", "sync", "evaluation")
    return (order.index(lane), "") if lane in order else (len(order), f"{len(lane):04d}{lane}")


def _sankey(run: RunData, look: Look) -> Figure | str:
    """Sampled tokens to what became of them; dropped ones to their reasons."""
    if run.audit is None:
        return "the ledger cannot be read: " + next((p for p in run.problems if "ledger" in p), "it is missing")
    if not run.audit.tokens_sampled:
        return "no token has been sampled yet"
    names, links = _flows(run.audit)
    colors = ["#2f6fdb", *(FATE_COLORS.get(name.split(":")[0], FATE_COLORS["dropped"]) for name in names[1:])]
    node = {"label": names, "color": colors, "pad": 18, "thickness": 16, "line": {"width": 0}}
    link = {
        "source": [source for source, _, _ in links],
        "target": [target for _, target, _ in links],
        "value": [value for _, _, value in links],
        "color": [faded(colors[target], 0.35) for _, target, _ in links],
    }
    trace = {"type": "sankey", "node": node, "link": link, "valueformat": ",", "valuesuffix": " tokens"}
    return Figure([trace], height=300)


def _flows(audit: Audit) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Names of the nodes, the first being what was sampled; (from, to, tokens) of every flow that is not empty."""
    fates = {name: audit.tokens[name] for name in ("trained", "masked", "dropped")}
    fates["in flight"] = audit.tokens_in_flight
    names = [f"sampled: {audit.tokens_sampled:,}"]
    links: list[tuple[int, int, int]] = []

    def flow(source: int, name: str, tokens: int) -> int:
        names.append(f"{name}: {tokens:,}")
        links.append((source, len(names) - 1, tokens))
        return len(names) - 1

    ends = {fate: flow(0, fate, tokens) for fate, tokens in fates.items() if tokens}
    for reason, loss in audit.losses.items():
        if loss.tokens:
            flow(ends["dropped"], _short(reason), loss.tokens)
    return names, links


def _short(reason: str) -> str:
    return reason if len(reason) <= 40 else reason[:37] + "…"


TIMELINE = Plot(
    key="timeline",
    title="Who worked and who waited",
    caption="All on one clock; gray and gaps are idle. Opens on the newest steps; a double-click shows all.",
    metrics=("learner_idle", "engine_idle", "publish_lag_s"),
    figure=_timeline,
    wide=True,
)

LEDGER = Plot(
    key="ledger",
    title="Where every sampled token went",
    caption="Conservation: sampled = trained + masked + dropped + in flight, proved from the run's ledger.",
    metrics=("num_tokens", "num_masked_tokens"),
    figure=_sankey,
)
