"""A study over its seeds: means with intervals, and differences to a baseline seed by seed."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from headway.study.design import SEED, Study, Trial
from headway.study.outcome import Outcome

LEVEL = 0.95
METHOD = (
    "intervals are Student's t at 95 % over seeds; differences are taken seed by seed, because runs of one seed "
    "share their first model and their order of prompts; a run that diverged counts as accuracy 0 from then on, in end "
    "and area; no correction is made for looking at many cells"
)

MEASURES = ("start", "end", "best", "area", "reward", "staleness", "ess", "k3", "cosine", "seconds")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds; `low` and `high` are None below two seeds."""

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


@dataclass(frozen=True, slots=True)
class Cell:
    """All seeds of one combination of the other axes.

    Example: `Cell({"algorithm": "grpo", "max_staleness": 16}, num_runs=3, num_failed=0, num_collapsed=1, …)`
    """

    settings: dict[str, Any]
    num_runs: int
    """That finished or diverged."""
    num_failed: int
    num_collapsed: int
    num_reached: int
    """Runs that reached the goal."""
    steps_to_goal: float | None
    """Median over all runs, one that never reached it counting as later than any; None where that is the median."""
    seconds_to_goal: float | None
    measures: dict[str, Estimate]
    difference: Estimate | None
    """`end` minus that of the baseline's cell, seed by seed; None for the baseline itself."""


def estimate(values: Sequence[float], *, level: float = LEVEL) -> Estimate:
    """Mean and Student-t interval, mean ± t_{n−1}·s/√n."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, n - 1)) * stdev(values) / n**0.5
    return Estimate(mean, mean - half, mean + half, n)


def summarize(study: Study, outcomes: Mapping[str, Outcome | None]) -> list[Cell]:
    """One cell for every combination but the seed's, in the grid's order. `outcomes`: by trial; None for a failed one.

    Trials that are absent have not ended yet.
    """
    cells: dict[str, list[Trial]] = {}
    for trial in study.trials:
        cells.setdefault(_key(_without_seed(trial.settings)), []).append(trial)
    return [_cell(study, trials, cells, outcomes) for trials in cells.values()]


def _cell(
    study: Study, trials: Sequence[Trial], cells: Mapping[str, list[Trial]], outcomes: Mapping[str, Outcome | None]
) -> Cell:
    settings = _without_seed(trials[0].settings)
    ended = {trial.settings.get(SEED): found for trial in trials if (found := outcomes.get(trial.name))}
    runs = list(ended.values())
    difference = None
    if study.baseline is not None and settings[study.baseline[0]] != study.baseline[1]:
        rivals = cells.get(_key(settings | dict([study.baseline])), [])
        theirs = {trial.settings.get(SEED): found for trial in rivals if (found := outcomes.get(trial.name))}
        difference = _difference(ended, theirs)
    return Cell(
        settings=settings,
        num_runs=len(runs),
        num_failed=sum(trial.name in outcomes and outcomes[trial.name] is None for trial in trials),
        num_collapsed=sum(run.collapsed for run in runs),
        num_reached=sum(run.steps_to_goal is not None for run in runs),
        steps_to_goal=_median([run.steps_to_goal for run in runs]),
        seconds_to_goal=_median([run.seconds_to_goal for run in runs]),
        measures={name: found for name in MEASURES if (found := _measure(runs, name))},
        difference=difference,
    )


def _measure(runs: Sequence[Outcome], name: str) -> Estimate | None:
    values = [value for run in runs if (value := getattr(run, name)) is not None]
    return estimate(values) if values else None


def _difference(ours: Mapping[Any, Outcome], theirs: Mapping[Any, Outcome]) -> Estimate | None:
    pairs = [(ours[seed].end, theirs[seed].end) for seed in ours if seed in theirs]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return estimate(differences) if differences else None


def _median(values: Sequence[float | None]) -> float | None:
    """None counts as later than any, and is the median where one of the middle values is None."""
    later = [math.inf if value is None else value for value in values]
    middle = median(later) if later else math.inf
    return middle if middle < math.inf else None


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != SEED}


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
