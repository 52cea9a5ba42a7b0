"""The commands that train many runs: `headway study` and `headway law …`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.cli_common import AsJson, Sets, console, errors, plain_errors, say, show
from headway.config import load_config

law_app = typer.Typer(help="Fit the staleness–learning-rate law to short runs of your own.", no_args_is_help=True)


def study(
    file: Annotated[Path, typer.Argument(help="A TOML file; docs/studies.md says what it holds.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default: runs/ and the file's name.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: what the file says, or one a core.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Check every combination and list them; run nothing.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try runs again that failed.")] = False,
    plot: Annotated[bool, typer.Option(help="Draw OUT/NAME-curves.png and -ends.png.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run a grid of settings over seeds, and sum it up; stop and repeat it at will."""
    with plain_errors("stopped; the same command continues the study"):
        from headway.planner.extra import require_extra
        from headway.runtime.study import check_study, run_study
        from headway.study.design import load_study
        from headway.study.plots import draw
        from headway.study.statistics import summarize
        from headway.study.tables import failures, legend, study_table, to_json

        require_extra("planner", "scipy")
        if plot:
            require_extra("plot", "matplotlib")
        asked, folder = load_study(file), out or Path("runs") / file.stem
        if check:
            for job in check_study(asked, folder, say=say):
                show(job.path.name)
            return
        ended = run_study(asked, folder, num_parallel=jobs, retry=retry, console=errors, say=say)
        cells = summarize(asked, ended.outcomes)
        if plot:
            draw(asked, ended.outcomes, folder)
        if as_json:
            print(json.dumps(to_json(asked, cells, ended.endings, ended.outcomes)))
        else:
            console.print(study_table(asked, cells))
            show(f"{legend(asked)}\ntable: {folder / 'results.sqlite'}")
        if failed := failures(ended.endings):
            say(f"{folder}: {failed}")


@law_app.command(name="sweep")
def law_sweep(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none sweeps the default.")] = None,
    overrides: Sets = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the runs; the same folder continues a sweep.")] = Path("law"),
    bounds: Annotated[list[int], typer.Option("--staleness", min=0, help="A max_staleness; repeatable.")] = [1, 4, 16],  # noqa: B006
    rates: Annotated[list[float], typer.Option("--lr", help="A learning rate; repeatable.")] = [1e-4, 3e-4, 1e-3, 3e-3],  # noqa: B006
    seeds: Annotated[list[int], typer.Option("--seed", help="A seed; repeatable.")] = [0],  # noqa: B006
    steps: Annotated[list[int], typer.Option(min=10, help="Steps of a run, the horizon T; repeatable.")] = [60],  # noqa: B006
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
) -> None:
    """Run a grid of short runs over bound and learning rate; stop and repeat it at will."""
    with plain_errors("stopped; the same command continues the sweep"):
        from headway.runtime.law import render_cells, sweep

        grid = {"bounds": bounds, "rates": rates, "lengths": steps, "seeds": seeds}
        console.print(
            render_cells(sweep(load_config(config, overrides), out, **grid, num_parallel=jobs, console=errors))
        )


@law_app.command(name="fit")
def law_fit(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep, or `runs` of a study.")],
    out: Annotated[Path, typer.Option(help="Where to write the fitted law.")] = Path("law.json"),
    algorithm: Annotated[str | None, typer.Option(help="Take the runs of this algorithm alone.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it to this file (needs the extra plot).")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit η_max(S, T) = min(a/S, b/T) to a sweep, with intervals."""
    with plain_errors():
        from headway.planner.extra import require_extra
        from headway.runtime.law import fit_folder, plot_law, render_cells, render_law

        require_extra("planner", "scipy")
        found = fit_folder(folder, out, algorithm)
        if plot is not None:
            require_extra("plot", "matplotlib")
            plot_law(found, plot)
        if as_json:
            print(json.dumps(found.to_dict()))
        else:
            console.print(render_cells(found.cells))
            console.print(render_law(found))
            show(f"law: {out}")


@law_app.command(name="recommend")
def law_recommend(
    law: Annotated[Path, typer.Argument(help="A file of `headway law fit`.")],
    staleness: Annotated[int, typer.Option(min=0, help="The bound to train with.")],
    steps: Annotated[int, typer.Option(min=1, help="The length of that run.")],
    as_json: AsJson = False,
) -> None:
    """The learning rate that a fitted law allows for another bound and length."""
    with plain_errors():
        from headway.runtime.law import recommendation

        found = recommendation(law, max_staleness=staleness, num_steps=steps)
        if as_json:
            print(json.dumps(found))
        else:
            show(
                f"learning rate {found['lr']:.3g} (lower end of the interval; estimate {found['estimate']:.3g}); "
                f"the constraint that binds: {found['binding']}"
            )
            for doubt in found["doubts"]:
                show(f"but: {doubt}")
