"""A study for people: one row a cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from headway.planner.collapse import RULE
from headway.study.design import SEED, Study
from headway.study.outcome import Ending, Outcome
from headway.study.statistics import METHOD, Cell, Estimate


def study_table(study: Study, cells: Sequence[Cell]) -> Table:
    """Mean and interval of what counts, cell by cell."""
    table = Table(title=study.title)
    axes = [key for key in study.axes if key != SEED]
    for key in axes:
        table.add_column(key.rpartition(".")[2])
    names = ["runs", "start", "end [95 %]", "area", "to goal", "collapsed", "staleness"]
    if study.baseline:
        names.insert(3, f"− {study.baseline[1]} [95 %]")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(*(str(cell.settings[key]) for key in axes), *_numbers(cell, study))
    table.caption = caption(study)
    return table


def caption(study: Study) -> str:
    """How the numbers are made."""
    return (
        f"start, end: held-out accuracy. area: its mean over the run. to goal: median steps to {study.goal:g}, and "
        f"runs that got there. {RULE[0].upper()}{RULE[1:]}. {METHOD[0].upper()}{METHOD[1:]}."
    )


def _numbers(cell: Cell, study: Study) -> list[str]:
    failed = f" + {cell.num_failed} failed" if cell.num_failed else ""
    difference = [interval(cell.difference, sign="+")] if study.baseline else []
    return [
        f"{cell.num_runs}{failed}",
        mean(cell.measures.get("start")),
        interval(cell.measures.get("end")),
        *difference,
        mean(cell.measures.get("area")),
        f"{'–' if cell.steps_to_goal is None else f'{cell.steps_to_goal:.0f}'} ({cell.num_reached})",
        f"{cell.num_collapsed} of {cell.num_runs}",
        mean(cell.measures.get("staleness"), digits=1),
    ]


def mean(found: Estimate | None, digits: int = 3) -> str:
    """The mean alone."""
    return "–" if found is None else f"{found.mean:.{digits}f}"


def interval(found: Estimate | None, sign: str = "") -> str:
    """Mean and interval, such as `0.812 [0.760, 0.864]`."""
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.mean:{sign}.3f}"
    return f"{found.mean:{sign}.3f} [{found.low:{sign}.2f}, {found.high:{sign}.2f}]"


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
