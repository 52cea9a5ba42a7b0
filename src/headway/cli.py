"""The command line: parse, build, run."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from headway.config import RunConfig, load_config
from headway.errors import HeadwayError

app = typer.Typer(
    help="Post-train language models by asynchronous reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
law_app = typer.Typer(help="Fit the staleness–learning-rate law to short runs of your own.", no_args_is_help=True)
app.add_typer(law_app, name="law")
console = Console()
errors = Console(stderr=True)

Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; keys are dotted.")]
RunDir = Annotated[Path, typer.Argument(help="A run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none runs the default.")] = None,
    overrides: Sets = [],  # noqa: B006  typer copies it
    run: Annotated[Path | None, typer.Option(help="Where to put the run; default: runs/ and a name.")] = None,
) -> None:
    """Train a new run."""
    with _plain_errors(RESUMABLE):
        from headway.runtime.checks import check_losses
        from headway.runtime.launch import check_engine
        from headway.runtime.law import apply_law
        from headway.runtime.run_folder import RunFolder
        from headway.runtime.task import check_environment

        settings = apply_law(load_config(config, overrides), _say)
        for check in (check_losses, check_engine, check_environment):  # before there is a folder to leave behind
            check(settings)
        name = f"{settings.task.name.replace(':', '-')}-{settings.label}-{time.strftime('%m%d-%H%M%S')}"
        folder = RunFolder.create(run or Path("runs") / name, settings)
        _run(folder, settings)


@app.command()
def resume(run: RunDir) -> None:
    """Continue a run that was stopped or killed at any moment."""
    with _plain_errors(RESUMABLE):
        from headway.runtime.run_folder import RunFolder

        _run(*RunFolder.open(run))


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run folder, a model directory or a hub id.")],
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "test",
    size: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 400,
    config: Annotated[Path | None, typer.Option(help="For a MODEL, not a RUN: the TOML file with its task.")] = None,
    overrides: Sets = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Greedy held-out accuracy of a run's newest checkpoint, or of any model on a task."""
    with _plain_errors():
        from headway.runtime.offline import evaluate_target

        result = evaluate_target(target, split=split, size=size, config_path=config, overrides=overrides, say=_say)
        if as_json:
            print(json.dumps({name: getattr(result, name) for name in result.__slots__}))
        else:
            _print(
                f"version {result.policy_version}: {split} accuracy {result.accuracy:.4f} "
                f"on {result.num_prompts} prompts, {result.mean_tokens:.1f} tokens each"
            )


@app.command()
def replay(run: RunDir, as_json: AsJson = False) -> None:
    """Train a recorded run again with no engine, and compare every checkpoint bit by bit."""
    with _plain_errors():
        from headway.runtime.replay import replay as replay_run
        from headway.runtime.run_folder import RunFolder
        from headway.runtime.wiring import replay_learner

        folder, settings = RunFolder.open(run)
        found = replay_run(folder, replay_learner(folder, settings))
        if as_json:
            facts = {"num_steps": found.num_steps, "compared": found.compared, "exact": found.exact}
            print(json.dumps({**facts, "differing": found.differing}))
        else:
            versions = ", ".join(map(str, found.compared)) or "none"
            verdict = f"DIFFERENT at versions {sorted(found.differing)}" if found.differing else "bit-identical"
            _print(
                f"replayed {found.num_steps} steps; checkpoints of versions {versions}: "
                f"{verdict if found.compared else 'nothing to compare with'}"
            )
        if not found.exact:
            raise typer.Exit(1)


@app.command()
def compare(
    run: RunDir,
    algorithms: Annotated[
        str | None, typer.Option(help="Comma-separated, such as grpo,estr:tau=1.0; default: the run's and a selection.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Comma-separated recorded steps; default: the newest.")] = None,
    baseline: Annotated[str | None, typer.Option(help="What differences are taken to; default: the run's.")] = None,
    fresh: Annotated[int, typer.Option(min=2, help="Fresh batches that make the on-policy reference.")] = 4,
    prompts: Annotated[
        Literal["same", "further"],
        typer.Option(help="Prompts the fresh batches ask: the recorded ones or later ones."),
    ] = "same",
    plot: Annotated[bool, typer.Option(help="Write RUN/compare.html.")] = True,
    as_json: AsJson = False,
) -> None:
    """Hold algorithms against the on-policy gradient on recorded batches of a run, offline."""
    with _plain_errors():
        from headway.report.compare import comparison_page
        from headway.report.page import require_plotly
        from headway.runtime.compare import compare_run
        from headway.runtime.run_folder import RunFolder, write_atomically

        if plot:
            require_plotly(", or give --no-plot")
        folder, settings = RunFolder.open(run)
        found = compare_run(
            folder,
            settings,
            algorithms=algorithms,
            steps=steps,
            baseline=baseline,
            num_fresh=fresh,
            prompts=prompts,
            say=_say,
        )
        if as_json:
            print(json.dumps(found))
        else:
            _print_comparison(found)
        if plot:
            write_atomically(folder.path / "compare.html", comparison_page(found))
            _say(f"plots: {folder.path / 'compare.html'}")


def _print_comparison(found: dict[str, Any]) -> None:
    from headway.report.compare import direction_table, facts_of, floor_lines, weight_table

    for step in found["steps"]:
        _print(facts_of(step))
        console.print(direction_table(step, baseline=found["baseline"]))
        for line in floor_lines(step):
            _print(line)
        console.print(weight_table(step))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first RUN.")] = None,
) -> None:
    """Write one self-contained HTML page about runs, finished or under way."""
    with _plain_errors():
        from headway.report.cards import write_report

        _say(f"report: {write_report(runs, out)}")


@app.command()
def ledger(run: RunDir, as_json: AsJson = False) -> None:
    """Prove that issued = trained + masked + dropped + in flight; exit 1 if it does not add up."""
    with _plain_errors():
        from headway.accounts import audit_file, render
        from headway.runtime.run_folder import RunFolder

        folder, settings = RunFolder.open(run)
        audit = audit_file(folder.ledger_path, max_staleness=settings.max_staleness)
        if as_json:
            print(json.dumps(audit.to_dict()))
        else:
            console.print(render(audit), markup=False)
        if not audit.ok:
            raise typer.Exit(1)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none plans the default.")] = None,
    overrides: Sets = [],  # noqa: B006
    run: Annotated[list[Path], typer.Option(help="A run folder to learn lengths and costs from; repeatable.")] = [],  # noqa: B006
    costs: Annotated[Path | None, typer.Option(help="A TOML file with costs; wins over what runs show.")] = None,
    gpus: Annotated[int | None, typer.Option(min=2, help="Devices to split between engines and learner.")] = None,
    gpus_per_engine: Annotated[int, typer.Option(min=1, help="Devices one engine takes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Simulate a configuration before paying for it: throughput, idle shares, staleness, the best split."""
    with _plain_errors():
        from headway.planner.extra import require_extra

        require_extra("planner", "simpy", "scipy")
        from headway.runtime.planning import plan as plan_run
        from headway.runtime.planning import render

        found = plan_run(
            load_config(config, overrides), runs=run, costs=costs, num_devices=gpus, devices_per_engine=gpus_per_engine
        )
        if as_json:
            print(json.dumps(found.to_dict()))
        else:
            console.print(render(found))


@law_app.command(name="sweep")
def law_sweep(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none sweeps the default.")] = None,
    overrides: Sets = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the runs; the same folder continues a sweep.")] = Path("law"),
    bounds: Annotated[list[int], typer.Option("--staleness", min=0, help="A max_staleness; repeatable.")] = [1, 4, 16],  # noqa: B006
    rates: Annotated[list[float], typer.Option("--lr", help="A learning rate; repeatable.")] = [1e-4, 3e-4, 1e-3, 3e-3],  # noqa: B006
    seeds: Annotated[list[int], typer.Option("--seed", help="A seed; repeatable.")] = [0],  # noqa: B006
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run: the horizon T.")] = 60,
) -> None:
    """Run a grid of short runs over bound and learning rate; stop and repeat it at will."""
    with _plain_errors("stopped; the same command continues the sweep"):
        from headway.runtime.law import render_cells, sweep

        settings = load_config(config, [*overrides, f"num_steps={steps}"])
        console.print(render_cells(sweep(settings, out, bounds=bounds, rates=rates, seeds=seeds, say=_say)))


@law_app.command(name="fit")
def law_fit(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep.")],
    out: Annotated[Path, typer.Option(help="Where to write the fitted law.")] = Path("law.json"),
    plot: Annotated[Path | None, typer.Option(help="Also draw it to this file (needs the extra plot).")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit η_max(S, T) = min(a/S, b/T) to a sweep, with intervals."""
    with _plain_errors():
        from headway.planner.extra import require_extra
        from headway.runtime.law import fit_folder, plot_law, render_cells, render_law

        require_extra("planner", "scipy")
        found = fit_folder(folder, out)
        if plot is not None:
            require_extra("plot", "matplotlib")
            plot_law(found, plot)
        if as_json:
            print(json.dumps(found.to_dict()))
        else:
            console.print(render_cells(found.cells))
            console.print(render_law(found))
            _print(f"law: {out}")


@law_app.command(name="recommend")
def law_recommend(
    law: Annotated[Path, typer.Argument(help="A file of `headway law fit`.")],
    staleness: Annotated[int, typer.Option(min=0, help="The bound to train with.")],
    steps: Annotated[int, typer.Option(min=1, help="The length of that run.")],
    as_json: AsJson = False,
) -> None:
    """The learning rate that a fitted law allows for another bound and length."""
    with _plain_errors():
        from headway.runtime.law import recommendation

        found = recommendation(law, max_staleness=staleness, num_steps=steps)
        if as_json:
            print(json.dumps(found))
        else:
            _print(
                f"learning rate {found['lr']:.3g} (lower end of the interval; estimate {found['estimate']:.3g}); "
                f"the constraint that binds: {found['binding']}"
            )


@app.command()
def doctor(
    engine: Annotated[
        str | None,
        typer.Option(metavar="RUN|MODEL", help="Measure how far engine and learner disagree on the same tokens."),
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="With --engine: how many responses.")] = 48,
    config: Annotated[Path | None, typer.Option(help="With --engine MODEL, not RUN: the TOML with its task.")] = None,
    overrides: Sets = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """What this machine supports and lacks; with --engine, the noise floor between engine and learner."""
    if engine is not None:
        _engine_noise(engine, size, config, overrides, as_json)
        return
    from headway.runtime.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([{"what": f.what, "state": f.state, "note": f.note} for f in findings]))
        return
    table = Table("what", "state", "note")
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.note)
    console.print(table, markup=False)


def _engine_noise(target: str, size: int, config: Path | None, overrides: list[str], as_json: bool) -> None:
    with _plain_errors():
        from headway.report.noise import noise_tables
        from headway.runtime.noise import measure_noise

        noise = measure_noise(target, size=size, config_path=config, overrides=overrides, say=_say)
        if as_json:
            print(json.dumps(asdict(noise)))
            return
        for part in noise_tables(asdict(noise)):
            console.print(part, markup=False, highlight=False)


def _run(folder: Any, settings: RunConfig) -> None:
    """Run a folder to its end under the live view, then print where it stands."""
    from headway.report.terminal import TerminalView, derived_table
    from headway.runtime.wiring import run_to_end

    console.print(derived_table(settings))
    _print(f"run folder: {folder.path}")
    with TerminalView(settings, console=console) as view:
        table, adds_up = run_to_end(folder, settings, log=view.log, say=view.say)
    console.print(table, markup=False)
    _print(f"run folder: {folder.path}\ncheckpoint: {folder.checkpoint(settings.num_steps)}")
    if not adds_up:
        raise typer.Exit(1)


def _print(text: str) -> None:
    """Text as it is: paths, names and log lines may hold brackets, which are no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    """The same, to stderr."""
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


RESUMABLE = "stopped; `headway resume` continues the run"


@contextmanager
def _plain_errors(stopped: str = "stopped") -> Iterator[None]:
    """A user's mistake or a stopped command ends with one clear message; a bug keeps its traceback."""
    try:
        yield
    except HeadwayError as error:
        _say(f"error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        _say(stopped)
        sys.exit(130)
