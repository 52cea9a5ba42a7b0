"""A study's file: settings common to all runs, a grid over any of their keys, and which combinations are wanted.

title = "does a larger rate stand a larger lag?"
goal = 0.8                       # held-out accuracy whose time is taken
[base]                           # as in a config file of `headway train`
num_steps = 60
[grid]
algorithm = ["grpo", "estr"]
max_staleness = [0, 16]
optimizer.lr = [3e-4, 1e-3]
seed = [0, 1, 2]
[[exclude]]                      # leave these out; [[only]] keeps nothing but what it names
algorithm = "estr"
optimizer.lr = [1e-3]
[baseline]                       # what the others are compared with, seed by seed
algorithm = "grpo"
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from headway.config import ConfigError, RunConfig, assign, parse_config, parse_section, read_toml
from headway.config_sections import Natural, Section
from headway.errors import nearest

SEED = "seed"


class StudyFile(Section):
    """What the TOML file of a study may hold."""

    title: str = ""
    """What is asked, in words."""
    config: str = ""
    """A config file of `headway train`, relative to this one, that `base` overrides."""
    jobs: Natural = 0
    """Runs side by side; 0: as many as there are cores."""
    goal: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Held-out accuracy whose first time is reported."""
    base: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    """Settings of all runs."""
    grid: dict[str, Any]
    """Dotted or nested keys, each with the list of its values."""
    only: list[dict[str, Any]] = []  # noqa: RUF012  pydantic copies it
    """Where given: combinations that match none of these are left out. A value may be a list of values."""
    exclude: list[dict[str, Any]] = []  # noqa: RUF012  pydantic copies it
    """Combinations that match any of these are left out."""
    baseline: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    """One key of the grid and the value that other values of it are compared with."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a study.

    Example: `Trial("grpo-max_staleness16-seed0", {"algorithm": "grpo", "max_staleness": 16, "seed": 0}, config)`
    """

    name: str
    settings: dict[str, Any]
    """Of the grid; keys are dotted."""
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Study:
    """A checked file: every trial's settings are those of a run that may start."""

    name: str
    """Of the file."""
    title: str
    jobs: int
    goal: float
    axes: dict[str, list[Any]]
    baseline: tuple[str, Any] | None
    trials: list[Trial]


def load_study(path: Path) -> Study:
    """Read and expand a study's file; seeds vary slowest, so that a study stopped early has every cell once.

    Raises ConfigError with every wrong key and value, and the combinations that no run could have.
    """
    file = parse_section(StudyFile, read_toml(path))
    base = read_toml(path.parent / file.config) if file.config else {}
    for key, value in flatten(file.base).items():
        assign(base, key, value, where="[base]")
    axes = _axes(file.grid)
    for table, rows in (("only", file.only), ("exclude", file.exclude)):
        _refuse_strangers(table, [flatten(row) for row in rows], axes)
    only, exclude = [flatten(row) for row in file.only], [flatten(row) for row in file.exclude]
    chosen = [
        settings
        for settings in _combinations(axes)
        if (not only or any(_matches(settings, row) for row in only))
        and not any(_matches(settings, row) for row in exclude)
    ]
    if not chosen:
        raise ConfigError(f"{path}: no combination of the grid is left; look at [grid], [[only]] and [[exclude]]")
    return Study(
        name=path.stem,
        title=file.title or path.stem,
        jobs=file.jobs,
        goal=file.goal,
        axes=axes,
        baseline=_baseline(flatten(file.baseline), axes, chosen),
        trials=_trials(base, axes, chosen),
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted keys.

    >>> flatten({"seed": 1, "optimizer": {"lr": 0.1}})
    {'seed': 1, 'optimizer.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _axes(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    axes = flatten(grid)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{key} must be a list of values, got {values!r}")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ConfigError(f"grid.{key} holds a value twice: {values}")
    if not axes:
        raise ConfigError("[grid] is empty: give at least one key and its values")
    return axes


def _refuse_strangers(table: str, rows: Sequence[Mapping[str, Any]], axes: Mapping[str, list[Any]]) -> None:
    """A row that names no key or value of the grid would silently match nothing."""
    for row in rows:
        for key, wanted in row.items():
            if key not in axes:
                raise ConfigError(f"{table}: {key!r} is no key of the grid; {nearest(key, axes)}")
            strangers = [value for value in _as_list(wanted) if value not in axes[key]]
            if strangers:
                raise ConfigError(f"{table}: {key} = {strangers[0]!r} is not in the grid's {axes[key]}")


def _baseline(
    named: Mapping[str, Any], axes: Mapping[str, list[Any]], chosen: Sequence[Mapping[str, Any]]
) -> tuple[str, Any] | None:
    """The key and the grid's own value; one that nothing could be compared with would show after hours of runs."""
    if len(named) > 1:
        raise ConfigError(f"[baseline] names {', '.join(named)}; it takes one key of the grid")
    for key, wanted in named.items():
        if key == SEED:
            raise ConfigError("baseline: seed cannot be compared, since differences are taken seed by seed")
        if key not in axes:
            raise ConfigError(f"baseline: {key!r} is no key of the grid; {nearest(key, axes)}")
        if wanted not in axes[key]:
            one = " (one value, not a list)" if isinstance(wanted, list) else ""
            raise ConfigError(f"baseline: {key} = {wanted!r} is not in the grid's {axes[key]}{one}")
        value = axes[key][axes[key].index(wanted)]  # 0.0 equals the grid's 0, but names other combinations
        kept = [settings[key] == value for settings in chosen]
        if all(kept) or not any(kept):
            raise ConfigError(
                f"baseline: {key} = {value!r} is that of {'all' if all(kept) else 'none of the'} combinations, so "
                "there is nothing to compare; name another, or leave [baseline] out"
            )
        return key, value
    return None


def _combinations(axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    slowest_first = sorted(axes, key=lambda key: key != SEED)
    for values in product(*(axes[key] for key in slowest_first)):
        settings = dict(zip(slowest_first, values, strict=True))
        yield {key: settings[key] for key in axes}


def _matches(settings: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return all(settings[key] in _as_list(wanted) for key, wanted in row.items())


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _trials(base: dict[str, Any], axes: Mapping[str, list[Any]], chosen: Sequence[dict[str, Any]]) -> list[Trial]:
    trials: dict[str, Trial] = {}
    complaints: dict[str, list[str]] = {}
    for settings in chosen:
        name, values = trial_name(settings), deepcopy(base)
        for key, value in settings.items():
            assign(values, key, value, where=f"[grid] {key}")
        try:
            config = parse_config(values)
        except ConfigError as error:
            complaints.setdefault(str(error), []).append(name)
            continue
        if name in trials:
            raise ConfigError(f"two combinations of the grid would both be named {name!r}; change a value")
        trials[name] = Trial(name, settings, config)
    refuse_all(complaints)
    return list(trials.values())


def refuse_all(complaints: Mapping[str, Sequence[str]]) -> None:
    """One error for a study's wrong combinations: each complaint once, with who it is about. Raises ConfigError."""
    if complaints:
        lines = [f"{complaint}\n  (in {_some(names)})" for complaint, names in complaints.items()]
        raise ConfigError("\n".join(lines))


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def trial_name(settings: Mapping[str, Any]) -> str:
    """A folder's name that says the settings.

    >>> trial_name({"algorithm": "grpo", "optimizer.lr": 0.001, "seed": 2})
    'grpo-lr0.001-seed2'
    """
    last = [key.rpartition(".")[2] for key in settings]
    parts = []
    for key, short in zip(settings, last, strict=True):
        value, label = settings[key], short if last.count(short) == 1 else key
        parts.append(value if isinstance(value, str) and value else f"{label}{_show(value)}")
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", "-".join(parts))


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
