"""`headway law`: a grid of real runs over bound and learning rate, the law fitted to it, a rate for another bound."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.config import ConfigError, RunConfig, parse_config
from headway.errors import HeadwayError
from headway.planner.law import SUPPORTED, Cell, Interval, Law, NotIdentified, classify, fit
from headway.report.jsonl import read_records
from headway.runtime.law_settings import belongs_to, differing, differing_among, unfit
from headway.runtime.run_folder import RunFolder, write_atomically
from headway.runtime.trial_view import TrialView
from headway.runtime.trials import Job, differing_settings, ending, forgive, run_all
from headway.study.outcome import accuracy_curve

Say = Callable[[str], None]

LAW_SCHEMA = 2


class SweepError(HeadwayError, RuntimeError):
    """A sweep or its file is not what the command needs; the message says what is."""


def sweep(
    config: RunConfig,
    folder: Path,
    *,
    bounds: Sequence[int],
    rates: Sequence[float],
    lengths: Sequence[int],
    seeds: Sequence[int],
    num_parallel: int,
    console: Console,
) -> list[Cell]:
    """Run every (bound, rate, length, seed) of the grid that is not finished yet; then classify all.

    Each is an ordinary run folder `S4-lr0.001-T60-seed0` with a constant rate, at a lag of exactly S. Killed at any
    point, the same command goes on where it stopped. A run that stops on non-finite gradients is a result, any other
    failure raises SweepError, once the others have ended.
    """
    jobs = [
        Job(folder / f"S{bound}-lr{rate:g}-T{length}-seed{seed}", _cell_config(config, bound, rate, length, seed))
        for rate, bound, length, seed in product(rates, bounds, lengths, seeds)
    ]
    if not jobs:
        raise SweepError("the grid is empty: give at least one bound, one rate, one length and one seed")
    for job in jobs:
        if differing := differing_settings(job):
            raise SweepError(f"{job.path} holds a run with other settings ({'; '.join(differing)}); name another --out")
    for job in jobs:
        forgive(job.path)
    todo = [job for job in jobs if ending(job.path) is None]
    with TrialView(jobs, todo, console=console) as view:
        run_all(todo, num_parallel=num_parallel, on_end=view.ended, on_tick=view.tick)
    failed = [f"{job.path}: {end.reason}" for job in jobs if (end := ending(job.path)) and end.state == "failed"]
    if failed:
        raise SweepError("\n".join(failed))
    return read_cells(folder)


def _cell_config(config: RunConfig, bound: int, rate: float, length: int, seed: int) -> RunConfig:
    """The run of one cell. Raises ConfigError where the lag cannot be exact."""
    values = config.model_dump()
    # Engines that lead by less than the bound would train on younger data than the cell is named after.
    values |= {"max_staleness": bound, "exact_lag": True, "num_steps": length, "seed": seed}
    values["optimizer"] |= {"lr": rate, "law": "", "schedule": "constant"}
    values["guard"] |= {"action": "off"}  # it would change what is measured
    return parse_config(values)


def read_cells(folder: Path, algorithm: str | None = None) -> list[Cell]:
    """Every ended run of a sweep's folder, classified. Raises SweepError when there is none, or when they differ."""
    runs = _ended_runs(folder, algorithm)
    configs = {run: RunFolder.open(run)[1] for run in runs}
    refused = defaultdict[str, list[str]](list)
    for run, config in configs.items():
        if why := unfit(config):
            refused[why].append(run.name)
    if refused:
        why, names = next(iter(refused.items()))
        raise SweepError(f"in {folder}, {', '.join(names[:3])}{', …' if len(names) > 3 else ''} {why}")
    if keys := differing_among(list(configs.values())):
        raise SweepError(
            f"the runs in {folder} differ in more than bound, rate, seed and length ({', '.join(keys)}); sweep one "
            "thing, or say --algorithm where they are of several"
        )
    return [_read_cell(run) for run in runs]


def _ended_runs(folder: Path, algorithm: str | None) -> list[Path]:
    """Run folders that say how training went, of one algorithm where it is named. Raises SweepError without any."""
    ended = [path for path in sorted(folder.glob("*/")) if (end := ending(path)) and end.state != "failed"]
    runs = [path for path in ended if algorithm in (None, RunFolder.open(path)[1].algorithm)]
    if not runs:
        which = f" of {algorithm}" if algorithm else ""
        raise SweepError(f"{folder} holds no ended run{which}; `headway law sweep CONFIG --out {folder}` makes them")
    return runs


def _read_cell(run: Path) -> Cell:
    folder, config = RunFolder.open(run)
    records = list(read_records(folder.metrics_path))
    steps = [r for r in records if r["kind"] == "step"]
    cell = Cell(
        max_staleness=config.max_staleness,
        lr=config.optimizer.peak,
        num_steps=config.num_steps,
        collapsed=False,
        mean_staleness=fmean(s["staleness_sample_mean"] for s in steps) if steps else None,
    )
    end = ending(run)
    finished = end is not None and end.state == "finished"
    return classify([s["reward"] for s in steps], accuracy_curve(records), cell, finished=finished)


def fit_folder(folder: Path, out: Path, algorithm: str | None = None) -> Law:
    """Fit the law to a sweep's runs and write it. Raises SweepError with the mend where the data show no border.

    `algorithm`: takes its runs alone, where the folder is that of a study of several.
    """
    cells = read_cells(folder, algorithm)
    try:
        law = fit(cells)
    except NotIdentified as error:
        raise SweepError(str(error)) from error
    config = RunFolder.open(_ended_runs(folder, algorithm)[0])[1]
    facts = {"schema": LAW_SCHEMA, "belongs_to": belongs_to(config), "law": law.to_dict()}
    write_atomically(out, json.dumps(facts, indent=1) + "\n")
    return law


def read_law(path: Path) -> tuple[Law, dict[str, Any]]:
    """A fitted law and the settings it belongs to. Raises SweepError."""
    if not path.is_file():
        raise SweepError(f"no fitted law at {path}; `headway law fit SWEEP --out {path}` writes one")
    try:
        facts = json.loads(path.read_bytes())
        if facts["schema"] != LAW_SCHEMA:
            raise SweepError(f"{path} has law schema {facts['schema']}, this Headway reads {LAW_SCHEMA}; fit it again")
        return Law.from_dict(facts["law"]), dict(facts["belongs_to"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SweepError(f"{path} is not a fitted law: {type(error).__name__}: {error}") from error


def apply_law(config: RunConfig, say: Say) -> RunConfig:
    """The config with its rate as a number: what `optimizer.law` allows, or less where the config asks for less.

    S·η of the law becomes `guard.budget`. Raises ConfigError where the rate is "law" and no law is named.
    """
    optimizer = config.optimizer
    if not optimizer.law:
        _ = optimizer.peak  # refuses "law" without a file
        return config
    law, fitted_with = read_law(Path(optimizer.law))
    if keys := differing(belongs_to(config), fitted_with):
        say(f"{optimizer.law} was fitted with other settings of {', '.join(keys)}; its constants may not transfer")
    allowed = _recommend(law, config.max_staleness, config.num_steps)
    rate = allowed if isinstance(optimizer.lr, str) else min(optimizer.lr, allowed)
    binding = law.binding(config.max_staleness, config.num_steps)
    say(f"learning rate {rate:.3g}; the law allows {allowed:.3g} at this bound and length ({binding} binds)")
    for doubt in law.doubts(config.max_staleness, config.num_steps):
        say(f"{optimizer.law}: {doubt}")
    budget = law.a.low if law.a.low is not None else config.guard.budget
    return config.model_copy(
        update={
            "optimizer": optimizer.model_copy(update={"lr": rate, "law": ""}),
            "guard": config.guard.model_copy(update={"budget": budget}),
        }
    )


def _recommend(law: Law, max_staleness: int, num_steps: int) -> float:
    try:
        return law.recommend(max_staleness, num_steps)
    except NotIdentified as error:
        raise ConfigError(str(error)) from error


def recommendation(path: Path, *, max_staleness: int, num_steps: int) -> dict[str, Any]:
    """What the law says for a bound and a length, and why that may be wrong."""
    law, _ = read_law(path)
    return {
        "max_staleness": max_staleness,
        "num_steps": num_steps,
        "lr": _recommend(law, max_staleness, num_steps),
        "estimate": law.max_lr(max_staleness, num_steps),
        "binding": law.binding(max_staleness, num_steps),
        "doubts": law.doubts(max_staleness, num_steps),
    }


def render_cells(cells: Sequence[Cell]) -> Table:
    """Bounds across, rates down: stable runs ÷ runs."""
    bounds = sorted({c.max_staleness for c in cells})
    table = Table(title="Stable runs of all, by learning rate and bound")
    for name in ("rate", *(f"S = {bound}" for bound in bounds)):
        table.add_column(name, justify="right")
    for rate in sorted({c.lr for c in cells}):
        row = [[c for c in cells if c.lr == rate and c.max_staleness == bound] for bound in bounds]
        table.add_row(
            f"{rate:g}", *(f"{sum(not c.collapsed for c in here)}/{len(here)}" if here else "" for here in row)
        )
    return table


def render_law(law: Law) -> Table:
    """The constants and what the data say of each."""
    table = Table(title="η_max(S, T) = min(a/S, b/T)")
    for name in ("constant", "estimate", f"{law.level:.0%} interval", "evidence that it binds"):
        table.add_column(name)
    rows = (("a  (S·η)", law.a, law.staleness_matters), ("b  (T·η)", law.b, law.horizon_matters))
    for name, interval, statistic in rows:
        verdict = "supported" if statistic > SUPPORTED else "not supported by these runs"
        table.add_row(name, f"{interval.estimate:.3g}", _span(interval), f"{verdict} (2Δℓ = {statistic:.1f})")
    exponents = (
        ("p  (η ∝ 1/S^p)", law.exponent, law.exponent_differs),
        ("q  (η ∝ 1/T^q)", law.horizon_exponent, law.horizon_exponent_differs),
    )
    for name, exponent, differs in exponents:
        if exponent is not None:
            verdict = "the law's 1 is rejected" if differs > SUPPORTED else "no evidence against the law's 1"
            table.add_row(name, f"{exponent.estimate:.2g}", _span(exponent), f"{verdict} (2Δℓ = {differs:.1f})")
    return table


def _span(interval: Interval) -> str:
    low = f"{interval.low:.3g}" if interval.low is not None else "open"
    return f"{low} – {f'{interval.high:.3g}' if interval.high is not None else 'open'}"


def plot_law(law: Law, path: Path) -> None:
    """Write `law_figure` to a file; needs the extra `plot`."""
    law_figure(law).savefig(path, dpi=150)


def law_figure(law: Law) -> Any:
    """Runs as dots over bound and rate, the fitted border as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for collapsed, marker, color in ((False, "o", "tab:blue"), (True, "x", "tab:red")):
        chosen = [c for c in law.cells if c.collapsed == collapsed]
        x, y = [_shown(c.max_staleness) for c in chosen], [c.lr for c in chosen]
        axes.scatter(x, y, marker=marker, color=color, label="collapsed" if collapsed else "stable")
    largest = max(c.max_staleness for c in law.cells)
    for steps in sorted({c.num_steps for c in law.cells}):
        bounds = [0, *(2 ** (i / 8) for i in range(round(8 * math.log2(max(2, largest))) + 1))]
        border = [min(law.a.estimate / s if s else math.inf, law.b.estimate / steps) for s in bounds]
        axes.plot([_shown(s) for s in bounds], border, color="black", label=f"fit, T = {steps}")
    axes.set(xscale="log", yscale="log", xlabel="max_staleness (0 drawn at 0.5)", ylabel="learning rate")
    axes.legend()
    return figure


def _shown(bound: float) -> float:
    """A logarithmic axis has no 0."""
    return bound or 0.5
