"""`headway plan`: a configuration and costs in, what it would do and the best split of the devices out."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headway.config import ConfigError, RunConfig
from headway.errors import nearest
from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts, ToolCosts
from headway.planner.forecast import Forecast
from headway.planner.lengths import Constant, LogNormal
from headway.planner.search import Option, best_bounds, recommend
from headway.planner.setup import Setup
from headway.planner.simulate import simulate
from headway.runtime.learned_costs import learn, shape_of
from headway.runtime.observed import CostsUnknown, observe

BOUNDS = (0, 1, 2, 4, 8)
"""Bounds that a search looks at."""

DOUBT = 0.1
"""Share by which one side's costs may be wrong without anyone's fault."""

_SECTIONS = {
    "engine": EngineCosts,
    "learner": LearnerCosts,
    "sync": SyncCosts,
    "tool": ToolCosts,
    "shared": SharedCosts,
}
_NUMBERS = {"prompt_tokens": 0, "learner_devices": 1}
"""Whole numbers, each with the least it can be."""

_LENGTHS = {"constant": Constant, "lognormal": LogNormal}


@dataclass(frozen=True, slots=True)
class Plan:
    """What was simulated, and what it comes to."""

    options: list[Option]
    """The configuration first, then what it is compared with, then the best split of every bound."""
    recommended: Option | None
    """Among the searched ones; None without a search."""
    spread: tuple[Forecast, Forecast]
    """The configuration with engines that take `DOUBT` less time, and as much more, than they were taken to."""
    left_out: list[str]
    """Settings of the configuration that take time or change staleness, and that no simulation knows."""

    def speedups(self, option: Option) -> tuple[float, float]:
        """Throughput over that of bound 0: on the same split (searched ones: on its own best split), and colocated."""
        searched = [o for o in self.options[3:] if o.setup.max_staleness == 0]
        split = searched[0] if option in self.options[3:] and searched else self.options[1]
        rate = option.forecast.samples_per_s
        return rate / split.forecast.samples_per_s, rate / self.options[2].forecast.samples_per_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        rows = []
        for option in self.options:
            over_split, over_colocated = self.speedups(option)
            speedups = {"speedup": over_split, "speedup_over_colocated": over_colocated}
            rows.append({**_shape(option), **speedups, **option.forecast.to_dict()})
        return {
            "options": rows,
            "recommended": _shape(self.recommended) if self.recommended else None,
            "spread": [forecast.to_dict() for forecast in self.spread],
            "left_out": self.left_out,
        }


def plan(
    config: RunConfig,
    *,
    runs: Sequence[Path],
    costs: Path | None,
    num_devices: int | None,
    devices_per_engine: int,
    bounds: Sequence[int] = BOUNDS,
) -> Plan:
    """Simulate a configuration, the same at bound 0 (split and colocated), and with `num_devices` the best splits.

    Costs come from run folders, from a TOML file, or from both, where the file wins. Raises CostsUnknown without any.
    """
    setup = build_setup(config, runs=runs, costs=costs)
    if num_devices is None:
        num_devices = setup.num_engines * devices_per_engine + round(setup.learner_devices)
    else:
        engines = min(setup.num_engines, (num_devices - 1) // devices_per_engine)
        if engines < 1:
            raise ConfigError(f"--gpus {num_devices} leaves none for the learner beside one engine; raise it")
        setup = replace(
            setup,
            num_engines=engines,
            learner_devices=num_devices - engines * devices_per_engine,
            shared=replace(setup.shared, num_cores=0),  # devices are each one's own
        )
    colocated = setup.colocated(num_devices=num_devices, devices_per_engine=devices_per_engine)
    shapes = {"as configured": setup, "synchronous": setup.synchronous(), "synchronous, colocated": colocated}
    options = [Option(name, shape, simulate(shape)) for name, shape in shapes.items()]
    doubted = spread(setup)
    if num_devices < 3 * devices_per_engine:
        return Plan(options, None, doubted, left_out(config))
    found = best_bounds(setup, num_devices=num_devices, devices_per_engine=devices_per_engine, bounds=bounds)
    return Plan(options + found, recommend(found), doubted, left_out(config))


def left_out(config: RunConfig) -> list[str]:
    """What a forecast says nothing of, by the setting's name."""
    asked = {
        "exact_lag": config.exact_lag,
        "evaluation.every": config.evaluation.every > 0,
        "distill.teacher": bool(config.distill.teacher),
        f"proximal = {config.proximal}": config.proximal not in ("train_start", "behavior", "loglinear"),
    }
    return [name for name, is_asked in asked.items() if is_asked]


def spread(setup: Setup) -> tuple[Forecast, Forecast]:
    """What a small error in one side's costs makes of a forecast: little, but where both sides are equally fast."""
    faster, slower = (replace(setup, engine=setup.engine.times(factor)) for factor in (1 - DOUBT, 1 + DOUBT))
    return simulate(faster), simulate(slower)


def build_setup(config: RunConfig, *, runs: Sequence[Path], costs: Path | None) -> Setup:
    """The configuration with learned and given costs. Raises CostsUnknown, ConfigError."""
    given = _read_costs(costs) if costs else {}
    if runs:
        return replace(learn([observe(run) for run in runs], config=config), **given)
    missing = [name for name in ("lengths", "engine", "learner") if name not in given]
    if missing:
        raise CostsUnknown(
            f"nothing says what {', '.join(missing)} are like: give --run FOLDER of a short run on this hardware, "
            "or --costs FILE (docs/planner.md shows one)"
        )
    given.setdefault("tool", ToolCosts(latency_s=config.task.latency_s))
    return Setup(**(shape_of(config) | given))


def _read_costs(path: Path) -> dict[str, Any]:
    """Fields of Setup from a TOML file. Raises ConfigError naming the key and the nearest right one."""
    if not path.is_file():
        raise ConfigError(f"no costs file at {path}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "lengths":
            found[name] = _lengths(value)
        elif name in _SECTIONS:
            found[name] = _build(_SECTIONS[name], value, name)
        elif name in _NUMBERS:
            found[name] = _number(name, value)
        else:
            known = ["lengths", *_NUMBERS, *_SECTIONS]
            raise ConfigError(f"{path}: unknown key {name!r}; {nearest(name, known)}")
    return found


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < _NUMBERS[name]:
        raise ConfigError(f"{name} must be a whole number of at least {_NUMBERS[name]}, got {value!r}")
    return value


def _lengths(values: Any) -> Constant | LogNormal:
    if not isinstance(values, Mapping):
        raise ConfigError("lengths must be a table")
    kind = values.get("kind", "lognormal")
    if not isinstance(kind, str) or kind not in _LENGTHS:
        raise ConfigError(f"lengths.kind {kind!r}; {nearest(str(kind), _LENGTHS)}")
    return _build(_LENGTHS[kind], {k: v for k, v in values.items() if k != "kind"}, "lengths")


def _build(cls: Any, values: Any, section: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section} must be a table")
    known = {field.name: field for field in fields(cls)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key {section}.{key}; {nearest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{section}.{key} must be a number, got {value!r}")
        if known[key].type is int and not isinstance(value, int):
            raise ConfigError(f"{section}.{key} must be a whole number, got {value!r}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ConfigError(f"{section} lacks {', '.join(missing)}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error


def _shape(option: Option) -> dict[str, Any]:
    setup = option.setup
    return {
        "name": option.name,
        "num_engines": setup.num_engines,
        "learner_devices": setup.learner_devices,
        "max_staleness": setup.max_staleness,
    }


def render(found: Plan) -> Table:
    """One row an option."""
    table = Table(title="Simulated steady state", box=SIMPLE_HEAD, padding=(0, 0), collapse_padding=True)
    table.add_column("option", min_width=len("synchronous,"))  # so that 80 columns break names between words
    headers = ("split", "S", "steps/h", "tokens/s", "×\nsync", "×\ncoloc", "idle\nl/e", "stale", "lost", "length")
    for name in headers:
        table.add_column(name, justify="right", no_wrap=True)
    for option in found.options:
        table.add_row(*_cells(found, option), style="bold" if option is found.recommended else None)
    table.caption = f"{_CAPTION} {_doubt(found.spread)}"
    if found.left_out:
        table.caption += f" Not simulated: {', '.join(found.left_out)}."
    if found.recommended:
        best = found.recommended.setup
        largest = max(option.setup.max_staleness for option in found.options)
        table.caption += (
            f" Recommended: engines:learner {best.num_engines}:{best.learner_devices:g}, "
            f"max_staleness = {best.max_staleness}, the smallest bound within 2 % of the best throughput"
            f"{', and the largest that was tried' if best.max_staleness == largest else ''}."
        )
    return table


_CAPTION = (
    "split: engines:learner devices. × sync, × coloc: throughput over bound 0 on a split, and with all devices serving "
    "both sides in turn. idle l/e: of learner and engines. stale: mean over trained tokens. lost: groups dropped + "
    "tokens masked. length: trained ÷ issued."
)


def _doubt(spread: tuple[Forecast, Forecast]) -> str:
    (few, many), (fresh, stale) = (
        sorted(getattr(forecast, name) for forecast in spread) for name in ("steps_per_hour", "staleness_token_mean")
    )
    return (
        f"As configured, were engines to take {DOUBT:.0%} less or more time: {few:,.1f} to {many:,.1f} steps/h, "
        f"stale {fresh:.2f} to {stale:.2f}."
    )


def _cells(found: Plan, option: Option) -> list[str]:
    setup, forecast = option.setup, option.forecast
    over_split, over_colocated = found.speedups(option)
    return [
        option.name,
        f"{setup.num_engines}:{setup.learner_devices:g}",
        str(setup.max_staleness),
        f"{forecast.steps_per_hour:,.1f}",
        f"{forecast.tokens_per_s:,.0f}",
        f"{over_split:.2f}",
        f"{over_colocated:.2f}",
        f"{forecast.learner_idle:.0%}/{forecast.engine_idle:.0%}",
        f"{forecast.staleness_token_mean:.2f}",
        f"{forecast.dropped_fraction + forecast.masked_fraction:.1%}",
        f"{forecast.length_bias:.2f}",
    ]
