"""What `headway compare` shows: a table a step, and a page of plots. Reads the comparison as plain data."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from headway.report.figures import QUADRANTS
from headway.report.page import require_plotly


def facts_of(step: Mapping[str, Any]) -> str:
    """The batch in two lines."""
    batch = step["batch"]
    line = (
        f"step {step['step']}, policy version {step['policy_version']}: {batch['num_groups']:.0f} groups "
        f"({batch['num_degenerate_groups']:.0f} teach nothing), token staleness {batch['staleness_token_mean']:.2f} "
        f"(max {batch['staleness_token_max']:.0f})"
    )
    if "ess_tokens" not in batch:
        return f"{line}; no behavior log-probs on record"
    shares = ", ".join(f"{label} {batch[f'share_{name}']:.1%}" for name, label in QUADRANTS.items())
    return (
        f"{line}\nmean |δ| {batch['mean_abs_delta']:.4f} nats, max r {batch['max_ratio']:.2f}, "
        f"ESS tokens {batch['ess_tokens']:.3f}, responses {batch['ess_responses']:.3f}; tokens with {shares}"
    )


def direction_table(step: Mapping[str, Any], *, baseline: str) -> Table:
    """Where each gradient points: a row an algorithm, under each reference's own row of what fresh data scores."""
    titles = {"cosine": 13, "bootstrap": 13, "of fresh": 4, f"Δ to {escape(baseline)}": 14}
    table = _table(f"step {step['step']}: gradients against the on-policy one", titles)
    for reference in step["references"]:
        table.add_row(*_fresh_row(reference), style="dim")
        for method in step["algorithms"]:
            if method["reference"] == reference["name"]:
                table.add_row(*_direction_row(method))
        table.add_section()
    return table


def weight_table(step: Mapping[str, Any]) -> Table:
    """How large each loss and gradient is, how noisy, and how it weighs tokens."""
    titles: tuple[str, ...] = ("loss", "‖g‖", "variance", "mean w", "ESS w", "Σ⁺/Σ⁻")
    table = _table(f"step {step['step']}: sizes and weights", dict.fromkeys(titles, 5))
    for method in step["algorithms"]:
        table.add_row(*_weight_row(method))
    return table


def stopped_table(step: Mapping[str, Any]) -> Table:
    """Tokens each algorithm lets nothing of through, by sign of A and side of r = 1."""
    table = _table(f"step {step['step']}: tokens stopped where", dict.fromkeys(("stopped", *QUADRANTS.values()), 6))
    for method in step["algorithms"]:
        shares = (method["weights"].get(f"stopped_{name}") for name in QUADRANTS)
        stopped = f"{method['weights']['stopped_fraction']:.1%}"
        table.add_row(escape(method["algorithm"]), stopped, *(_or_dash(share, ".1%") for share in shares))
    return table


def _table(title: str, widths: Mapping[str, int]) -> Table:
    """Algorithms down, numbers across: least widths that leave whole what a terminal of 80 columns shows."""
    table = Table(title=title)
    table.add_column("algorithm", min_width=14, overflow="fold")
    for name, width in widths.items():
        table.add_column(name, justify="right", min_width=width)
    return table


def floor_lines(step: Mapping[str, Any]) -> list[str]:
    """The noise floor of each reference in a sentence."""
    return [_floor_line(reference, reference["floor"]) for reference in step["references"]]


def _floor_line(reference: Mapping[str, Any], floor: Mapping[str, float]) -> str:
    return (
        f"{reference['name']}: ‖g‖ {reference['grad_norm']:.3g}; halves of the fresh data agree to "
        f"{floor['half_cosine']:.3f} ± {floor['half_cosine_sd']:.3f}; so the reference is expected at "
        f"{floor['reference_truth']:.3f} to the true gradient, one fresh batch at {floor['batch_truth']:.3f}"
    )


def _fresh_row(reference: Mapping[str, Any]) -> list[str]:
    floor = reference["floor"]
    cosine = f"{floor['fresh']:.3f} ± {floor['fresh_sd']:.3f}"
    return [f"fresh: {reference['name']}", cosine, "", "1", ""]


def _direction_row(method: Mapping[str, Any]) -> list[str]:
    return [
        escape(method["algorithm"]),
        f"{method['cosine']:.3f} ± {_or_dash(method['cosine_se'], '.3f')}",
        _bootstrap(method["bootstrap"]),
        _or_dash(method["of_fresh"], ".2f"),
        f"{method['difference']:+.3f} ± {_or_dash(method['difference_se'], '.3f')}",
    ]


def _bootstrap(found: Mapping[str, float] | None) -> str:
    return "–" if found is None else f"{found['mean']:.3f} ± {found['sd']:.3f}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _weight_row(method: Mapping[str, Any]) -> list[str]:
    return [
        escape(method["algorithm"]),
        f"{method['loss']:.4f}",
        f"{method['grad_norm']:.3g}",
        _or_dash(method["relative_variance"], ".2f"),
        f"{method['weights']['mean_weight']:.2f}",
        f"{method['weights']['weight_ess']:.2f}",
        f"{method['metrics']['loss_balance']:.2f}",
    ]


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """A self-contained HTML page with the plots. Raises PlotlyMissing."""
    require_plotly()
    import plotly.graph_objects as go

    steps = comparison["steps"]
    figures = [_cosine_figure(go, steps), *(_stopped_figure(go, step) for step in steps), _variance_figure(go, steps)]
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0, default_height="480px")
        for index, figure in enumerate(figures)
    ]
    facts = "".join(f"<p>{html.escape(facts_of(step))}</p>" for step in steps).replace("\n", "<br>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>headway compare</title>'
        '<body style="font-family: sans-serif; max-width: 1100px; margin: auto">'
        f"<h1>Algorithms on the same recorded batches</h1>{facts}{''.join(parts)}</body></html>"
    )


def _labels(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"step {step['step']}" for step in steps]


def _names(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [method["algorithm"] for method in steps[0]["algorithms"]]


def _series(steps: Sequence[Mapping[str, Any]], name: str, key: str) -> list[float | None]:
    return [method[key] for step in steps for method in step["algorithms"] if method["algorithm"] == name]


def _cosine_figure(go: Any, steps: Sequence[Mapping[str, Any]]) -> Any:
    """Cosine with one standard error each way, and a diamond where fresh data stands."""
    figure = go.Figure()
    for step, label in zip(steps, _labels(steps), strict=True):
        methods = step["algorithms"]
        names = [method["algorithm"] for method in methods]
        error = {"type": "data", "array": [method["cosine_se"] for method in methods]}
        figure.add_bar(x=names, y=[method["cosine"] for method in methods], error_y=error, name=label)
        floors = {reference["name"]: reference["floor"] for reference in step["references"]}
        figure.add_scatter(
            x=names,
            y=[floors[method["reference"]]["fresh"] for method in methods],
            error_y={"type": "data", "array": [floors[method["reference"]]["fresh_sd"] for method in methods]},
            mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": "black"},
            name=f"{label}: a fresh batch",
        )
    return figure.update_layout(
        title="Cosine with the on-policy gradient (bars: standard error over prompts)", barmode="group"
    )


def _stopped_figure(go: Any, step: Mapping[str, Any]) -> Any:
    """Fraction of tokens without gradient, by quadrant."""
    figure = go.Figure()
    methods = step["algorithms"]
    for name, label in QUADRANTS.items():
        figure.add_bar(
            x=[method["algorithm"] for method in methods],
            y=[method["weights"].get(f"stopped_{name}", 0.0) for method in methods],
            name=label,
        )
    return figure.update_layout(
        title=f"Step {step['step']}: fraction of tokens whose gradient is cut to 0", barmode="stack"
    )


def _variance_figure(go: Any, steps: Sequence[Mapping[str, Any]]) -> Any:
    figure = go.Figure()
    for name in _names(steps):
        figure.add_bar(x=_labels(steps), y=_series(steps, name, "relative_variance"), name=name)
    return figure.update_layout(title="Variance of the gradient over its squared norm (1: only noise)", barmode="group")
