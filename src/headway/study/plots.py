"""A study drawn with matplotlib: accuracy over steps, and where every run ended. Needs the extra `plot`."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.study.design import SEED, Study, Trial
from headway.study.outcome import Outcome
from headway.study.statistics import estimate

Runs = list[Outcome]
Panels = list[tuple[dict[str, Any], Any]]
"""The settings that a panel shows, and its axes."""


def draw(study: Study, outcomes: Mapping[str, Outcome | None], folder: Path) -> None:
    """Write `NAME-curves.png` and `NAME-ends.png`."""
    for name, figure in draw_figures(study, outcomes).items():
        figure.savefig(folder / f"{study.name}-{name}.png", dpi=110)


def draw_figures(study: Study, outcomes: Mapping[str, Outcome | None]) -> dict[str, Any]:
    """`curves` and `ends`: the first axis is compared in a panel for each value of the rest."""
    drawn = {}
    series, *others = [key for key in study.axes if key != SEED] or [SEED]
    *rows, column = others or [""]
    for name, plot, height in (("curves", _curves, 2.4), ("ends", _ends, 0.7 + 0.25 * len(study.axes[series]))):
        figure, panels = _grid(study, rows, column, height)
        for settings, axes in panels:
            runs = {value: _runs(study.trials, outcomes, settings | {series: value}) for value in study.axes[series]}
            plot(axes, {str(value): found for value, found in runs.items()})
        if name == "curves":
            shown = {line.get_label(): line for _, axes in panels for line in axes.get_legend_handles_labels()[0]}
            columns = min(max(1, int(figure.get_figwidth() / 1.4)), len(shown) or 1)
            figure.legend(shown.values(), shown, loc="outside lower center", ncols=columns, frameon=False)
        drawn[name] = figure
    return drawn


def _grid(study: Study, rows: Sequence[str], column: str, height: float) -> tuple[Any, Panels]:
    """A figure and its panels."""
    from matplotlib.figure import Figure

    across = study.axes[column] if column else [None]
    down = list(product(*(study.axes[key] for key in rows)))
    size = (max(4.0, 3.0 * len(across)), height * len(down) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(down), len(across), sharex=True, sharey=True, squeeze=False)
    panels = []
    for i, values in enumerate(down):
        for j, value in enumerate(across):
            settings = dict(zip(rows, values, strict=True)) | ({column: value} if column else {})
            grid[i][j].set_title("\n".join(f"{k.rpartition('.')[2]} {v}" for k, v in settings.items()), fontsize=9)
            panels.append((settings, grid[i][j]))
    return figure, panels


def _runs(trials: Sequence[Trial], outcomes: Mapping[str, Outcome | None], settings: Mapping[str, Any]) -> Runs:
    chosen = [t for t in trials if all(t.settings[key] == value for key, value in settings.items())]
    return [found for trial in chosen if (found := outcomes.get(trial.name))]


def _curves(axes: Any, series: Mapping[str, Runs]) -> None:
    """The mean over seeds as a thick line, every seed as a thin one."""
    for i, (label, runs) in enumerate(series.items()):
        if not runs:
            continue
        color = f"C{i}"
        for run in runs:
            axes.plot(list(run.curve), list(run.curve.values()), color=color, alpha=0.25, linewidth=0.7)
        shared = sorted(set.intersection(*(set(run.curve) for run in runs)))
        mean = [fmean(run.curve[version] for run in runs) for version in shared]
        axes.plot(shared, mean, color=color, linewidth=1.8, label=label)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.label_outer()


def _ends(axes: Any, series: Mapping[str, Runs]) -> None:
    """Every run's last accuracy (a cross where it collapsed), the mean and its interval."""
    for i, runs in enumerate(series.values()):
        ends = [(run.end, run.collapsed) for run in runs if run.end is not None]
        for end, collapsed in ends:
            axes.plot(end, i, "x" if collapsed else "o", color="tab:red" if collapsed else "tab:blue", markersize=5)
        if ends:
            found = estimate([end for end, _ in ends])
            if found.low is not None and found.high is not None:
                axes.plot([found.low, found.high], [i, i], color="0.6", linewidth=4, alpha=0.5, zorder=0)
            axes.plot(found.mean, i, "|", color="black", markersize=12)
    axes.set(xlim=(-0.02, 1.02), xlabel="held-out accuracy at the end", yticks=range(len(series)))
    axes.set_yticklabels(list(series))
    if not axes.yaxis_inverted():  # the panels share their axes
        axes.invert_yaxis()
    axes.label_outer()
