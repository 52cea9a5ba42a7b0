"""A study for people: one row a cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headway.planner.collapse import RULE
from headway.study.design import SEED, Study
from headway.study.outcome import Ending, Outcome
from headway.study.statistics import METHOD, Cell, Estimate


def study_table(study: Study, cells: Sequence[Cell]) -> Table:
    """Mean and interval of what counts, cell by cell; `legend` explains it."""
    table = Table(title=study.title, box=SIMPLE_HEAD, padding=(0, 0), collapse_padding=True)
    axes = [key for key in study.axes if key != SEED]
    for key in axes:
        table.add_column(key.rpartition(".")[2].replace("_", "\n"), no_wrap=True)
    for name in ("start", "end", *_against(study), "area", "to goal", "lost"):
        table.add_column(f" {name}", justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(*(str(cell.settings[key]) for key in axes), *_numbers(cell, study))
    return table


def legend(study: Study) -> str:
    """What the columns of the table are, and how the numbers are made."""
    against = f" − {study.baseline[1]}: difference of end." if study.baseline else ""
    return (
        f"start, end: held-out accuracy.{against} area: its mean over the run. to goal: median steps to "
        f"{study.goal:g} (runs that got there). lost: runs that collapsed, of all that ended.\n"
        f"{RULE[0].upper()}{RULE[1:]}.\n{METHOD[0].upper()}{METHOD[1:]}."
    )


def failures(endings: Mapping[str, Ending]) -> str | None:
    """Which runs failed, where they say why, and how to go on; None where none did."""
    failed = [name for name, end in endings.items() if end.state == "failed"]
    if not failed:
        return None
    names = ", ".join(failed[:3]) + (", …" if len(failed) > 3 else "")
    return f"{len(failed)} failed ({names}): runs/NAME/train.log says why; --retry tries them again"


def _against(study: Study) -> list[str]:
    return [f"− {study.baseline[1]}"] if study.baseline else []


def _numbers(cell: Cell, study: Study) -> list[str]:
    failed = f" +{cell.num_failed} failed" if cell.num_failed else ""
    difference = [interval(cell.difference, sign="+")] if study.baseline else []
    return [
        mean(cell.measures.get("start")),
        interval(cell.measures.get("end")),
        *difference,
        mean(cell.measures.get("area")),
        f"{'–' if cell.steps_to_goal is None else f'{cell.steps_to_goal:.0f}'} ({cell.num_reached})",
        f"{cell.num_collapsed}/{cell.num_runs}{failed}",
    ]


def mean(found: Estimate | None) -> str:
    """The mean alone."""
    return "–" if found is None else f"{found.mean:.2f}"


def interval(found: Estimate | None, sign: str = "") -> str:
    """Mean and half width of the interval, such as `0.81 ± 0.05`."""
    if found is None:
        return "–"
    width = "" if found.high is None else f" ± {found.high - found.mean:.2f}"
    return f"{found.mean:{sign}.2f}{width}"


def to_json(
    study: Study, cells: Sequence[Cell], endings: Mapping[str, Ending], outcomes: Mapping[str, Outcome | None]
) -> dict[str, Any]:
    """Everything, as plain data."""
    runs = [
        {"name": trial.name, "settings": trial.settings, **asdict(endings[trial.name]), **_facts(outcomes[trial.name])}
        for trial in study.trials
        if trial.name in endings
    ]
    return {
        "study": study.title,
        "rule_of_collapse": RULE,
        "method": METHOD,
        "goal": study.goal,
        "num_trials": len(study.trials),
        "cells": [asdict(cell) for cell in cells],
        "runs": runs,
    }


def _facts(outcome: Outcome | None) -> dict[str, Any]:
    return {} if outcome is None else asdict(outcome) | {"collapsed": outcome.collapsed}
