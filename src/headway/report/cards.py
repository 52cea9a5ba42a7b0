"""The report as plain data: what the page's script turns into cards, and nothing else."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.accounts import Audit
from headway.report.definitions import definitions
from headway.report.figures import Figure, Trace, clean, color, smooth, wall_clock_s
from headway.report.legend import Look, legend, of_run
from headway.report.machine_plots import LEDGER, TIMELINE
from headway.report.page import page, require_plotly
from headway.report.plots import DRIFT, LEARNING, MACHINE, Plot
from headway.report.run_data import NoRun, RunData, read_runs
from headway.report.token_plots import BY_ENTROPY, STALENESS, STOPPED

SECTIONS: dict[str, Sequence[Plot]] = {
    "Learning": LEARNING,
    "Staleness": STALENESS,
    "Off-policy drift": (*DRIFT[:2], BY_ENTROPY, DRIFT[2], STOPPED, *DRIFT[3:]),
    "Machine": (*MACHINE, TIMELINE),
    "Accounts": (LEDGER,),
}
"""The page from top to bottom."""


def report(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything the page shows, as JSON data."""
    looks = [Look(color(i), run.name if len(runs) > 1 else "") for i, run in enumerate(runs)]
    pairs = list(zip(runs, looks, strict=True))
    used = {name for plots in SECTIONS.values() for plot in plots for name in plot.metrics}
    known = definitions()
    return clean(
        {
            "made": time.strftime("%Y-%m-%d %H:%M"),
            "runs": [_summary(run, look) for run, look in pairs],
            "sections": [
                {"title": title, "cards": [_card(plot, pairs) for plot in plots]} for title, plots in SECTIONS.items()
            ],
            "definitions": [
                {"name": name, "unit": known[name].unit, "meaning": known[name].meaning} for name in sorted(used)
            ],
        }
    )


def write_report(paths: Sequence[Path], out: Path | None) -> Path:
    """Read these run folders and write the page; returns where. Raises NoRun and PlotlyMissing."""
    require_plotly()
    target = out or paths[0] / "report.html"
    text = page(report(read_runs(paths)))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NoRun(f"cannot write {target}: {error}; give --out") from error
    return target


def _card(plot: Plot, runs: Sequence[tuple[RunData, Look]]) -> dict[str, Any]:
    """One plot over all runs, or one a run; runs that cannot be drawn leave a note with the reason."""
    figures: list[tuple[str, Figure]] = []
    traces: list[Trace] = []
    keys = []
    silent: dict[str, list[str]] = {}
    for run, look in runs:
        found = plot.figure(run, look) if plot.figure else plot.draw(run, look) if plot.draw else []
        if isinstance(found, str):
            silent.setdefault(found, []).append(look.run)
        elif isinstance(found, Figure):
            figures.append((look.run, found))
        else:
            keys += [{"run": look.run, "color": look.color}] if look.run else []
            traces += of_run(found, look)
    if traces:
        figures.append(("", Figure(legend(traces), plot.layout)))
    return {
        "key": plot.key,
        "title": plot.title,
        "caption": plot.caption,
        "metrics": list(plot.metrics),
        "wide": plot.wide or len(figures) > 1,
        "keys": keys,
        "notes": [{"run": ", ".join(filter(None, names)), "text": text} for text, names in silent.items()],
        "figures": [
            {"run": run, "traces": figure.traces, "layout": figure.layout, "height": figure.height}
            for run, figure in figures
        ],
    }


def _summary(run: RunData, look: Look) -> dict[str, Any]:
    """A run at a glance."""
    parts = [run.setting("algorithm"), f"on {run.setting('task.name')}" if run.setting("task.name") else None]
    if run.setting("distill.teacher"):
        parts.append(f"with {run.setting('distill.method')}")
    if run.setting("max_staleness") is not None:
        parts.append(f"max_staleness {run.setting('max_staleness')}")
    parts.append(Path(str(run.setting("model.path"))).name if run.setting("model.path") else None)
    return {
        "name": run.name,
        "color": look.color,
        "about": ", ".join(str(part) for part in parts if part),
        "tiles": [{"label": label, "value": value} for label, value in _tiles(run)],
        "problems": run.problems,
        "accounts": _accounts(run.audit),
    }


def _tiles(run: RunData) -> list[tuple[str, str]]:
    tiles = []
    if run.steps:
        num_steps = run.setting("num_steps")
        tiles.append(("steps", f"{len(run.steps)} of {num_steps}" if num_steps else str(len(run.steps))))
        window = max(1, min(20, len(run.steps) // 10))
        for label, metric, form in (("reward", "reward", ".3f"), ("staleness", "staleness_token_mean", ".2f")):
            if (value := smooth(run.column(metric), window)[-1]) is not None:
                tiles.append((label, format(value, form)))
    tests = [one for one in run.evaluations if one.get("split") == "test" and "accuracy" in one]
    if tests:
        first_and_last = dict.fromkeys(f"{one['accuracy']:.3f}" for one in (tests[0], tests[-1]))
        tiles.append(("test accuracy", " → ".join(first_and_last)))
    for label, metric in (("learner idle", "learner_idle"), ("engines idle", "engine_idle")):
        known = [value for value in run.column(metric) if value is not None]
        if known:
            tiles.append((label, f"{sum(known) / len(known):.0%}"))
    if run.steps and (seconds := wall_clock_s(run)[-1]):
        tiles.append(("training time", _duration(seconds)))
    if run.audit is not None:
        tiles.append(("ledger", "adds up" if run.audit.ok else "DOES NOT ADD UP"))
    return tiles


def _duration(seconds: float) -> str:
    """
    >>> _duration(59.4), _duration(150), _duration(9000)
    ('59 s', '2.5 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _accounts(audit: Audit | None) -> dict[str, Any] | None:
    """The conservation law as a table: a row a fate, then the sum and what was counted when it happened."""
    if audit is None:
        return None
    rows = [[fate, audit.samples[fate], audit.tokens[fate]] for fate in ("trained", "masked", "dropped")]
    rows.append(["in flight", audit.samples_in_flight, audit.tokens_in_flight])
    total = ["sum", sum(row[1] for row in rows), sum(row[2] for row in rows)]
    counted = ["issued, sampled", audit.samples_issued, audit.tokens_sampled]
    return {"rows": [*rows, total, counted], "violations": audit.violations}
