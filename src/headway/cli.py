"""The command line: parse, build, run."""

import json
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli_common import (
    AsJson,
    RunDir,
    Sets,
    console,
    loading,
    plain_errors,
    say,
    show,
    told_now_and_then,
)
from headway.cli_doctor import doctor
from headway.cli_studies import law_app, study
from headway.config import RunConfig, load_config

app = typer.Typer(
    help="Post-train language models by asynchronous reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(study)
app.command()(doctor)
app.add_typer(law_app, name="law")


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none runs the default.")] = None,
    overrides: Sets = [],  # noqa: B006  typer copies it
    run: Annotated[Path | None, typer.Option(help="Where to put the run; default: runs/ and a name.")] = None,
) -> None:
    """Train a new run."""
    with plain_errors():
        asked = load_config(config, overrides)
        loading("the settings' task and model")
        from headway.runtime.checks import check_losses
        from headway.runtime.group import check_ranks
        from headway.runtime.launch import check_engine
        from headway.runtime.law import apply_law
        from headway.runtime.reporting import check_sinks
        from headway.runtime.run_folder import RunFolder
        from headway.runtime.task import check_environment, check_models

        if run:
            RunFolder.require_free(run)
        settings = apply_law(asked, say)
        for check in (
            check_losses,
            check_engine,
            check_ranks,
            check_environment,
            check_models,
            check_sinks,
        ):  # before there is a folder to leave behind
            check(settings)
        name = f"{settings.task.name.replace(':', '-')}-{settings.label}-{time.strftime('%m%d-%H%M%S')}"
        folder = RunFolder.create(run or Path("runs") / name, settings)
        _run(folder, settings)


@app.command()
def resume(run: RunDir) -> None:
    """Continue a run that was stopped or killed at any moment."""
    with plain_errors():
        loading(run)
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
    with plain_errors():
        loading(target)
        from headway.runtime.offline import evaluate_target

        result = evaluate_target(target, split=split, size=size, config_path=config, overrides=overrides, say=say)
        if as_json:
            print(json.dumps({name: getattr(result, name) for name in result.__slots__}))
        else:
            show(
                f"version {result.policy_version}: {split} accuracy {result.accuracy:.4f} "
                f"on {result.num_prompts} prompts, {result.mean_tokens:.1f} tokens each"
            )


@app.command()
def replay(run: RunDir, as_json: AsJson = False) -> None:
    """Train a recorded run again with no engine, and compare every checkpoint bit by bit."""
    with plain_errors():
        loading(run)
        from headway.runtime.learners import replay_learner
        from headway.runtime.replay import replay as replay_run
        from headway.runtime.run_folder import RunFolder

        folder, settings = RunFolder.open(run)
        with ExitStack() as stack:
            found = replay_run(folder, replay_learner(folder, settings, stack), on_step=told_now_and_then("replayed"))
        if as_json:
            facts = {"num_steps": found.num_steps, "compared": found.compared, "exact": found.exact}
            print(json.dumps({**facts, "differing": found.differing}))
        else:
            versions = ", ".join(map(str, found.compared)) or "none"
            verdict = f"DIFFERENT at versions {sorted(found.differing)}" if found.differing else "bit-identical"
            show(
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
    with plain_errors():
        loading(run)
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
            say=say,
        )
        if as_json:
            print(json.dumps(found))
        else:
            _print_comparison(found)
        if plot:
            write_atomically(folder.path / "compare.html", comparison_page(found))
            say(f"plots: {folder.path / 'compare.html'}")


def _print_comparison(found: dict[str, Any]) -> None:
    from headway.report.compare import direction_table, facts_of, floor_lines, stopped_table, weight_table

    for step in found["steps"]:
        show(facts_of(step))
        console.print(direction_table(step, baseline=found["baseline"]))
        for line in floor_lines(step):
            show(line)
        console.print(weight_table(step))
        console.print(stopped_table(step))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first RUN.")] = None,
) -> None:
    """Write one self-contained HTML page about runs, finished or under way."""
    with plain_errors():
        loading(", ".join(str(run) for run in runs))
        from headway.report.cards import write_report

        say(f"report: {write_report(runs, out)}")


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are shown side by side.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    """Serve the report on this machine, live while the runs train; only reads what they write."""
    with plain_errors("stopped watching; the runs go on"):
        from headway.report.watch import watch as serve

        serve(runs, port=port, say=say)


@app.command()
def ledger(run: RunDir, as_json: AsJson = False) -> None:
    """Prove that issued = trained + masked + dropped + in flight; exit 1 if it does not add up.

    Samples count when they are issued, tokens when their response or a lost attempt at it is received.
    """
    with plain_errors():
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
    with plain_errors():
        asked = load_config(config, overrides)
        from headway.planner.extra import require_extra

        require_extra("planner", "simpy", "scipy")
        say("simulating …")
        from headway.runtime.planning import plan as plan_run
        from headway.runtime.planning import render

        found = plan_run(asked, runs=run, costs=costs, num_devices=gpus, devices_per_engine=gpus_per_engine)
        if as_json:
            print(json.dumps(found.to_dict()))
        else:
            console.print(render(found))


def _run(folder: Any, settings: RunConfig) -> None:
    """Run a folder to its end under the live view, then print where it stands."""
    resumable = f"stopped; `headway resume {shlex.quote(str(folder.path))}` continues the run"
    with plain_errors(resumable):  # from here on: the imports take seconds in which a stop may come
        from headway.report.terminal import TerminalView, derived_table
        from headway.runtime.wiring import run_to_end

        console.print(derived_table(settings))
        show(f"run folder: {folder.path}")
        with TerminalView(settings, console=console) as view:
            table, adds_up = run_to_end(folder, settings, log=view.log, say=view.say)
        console.print(table, markup=False)
        show(f"run folder: {folder.path}\ncheckpoint: {folder.checkpoint(settings.num_steps)}")
    if not adds_up:
        raise typer.Exit(1)
