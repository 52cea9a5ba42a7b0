"""The commands that train many runs: `headway law …`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.cli_common import AsJson, Sets, console, plain_errors, say, show
from headway.config import load_config

law_app = typer.Typer(help="Fit the staleness–learning-rate law to short runs of your own.", no_args_is_help=True)


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
    with plain_errors("stopped; the same command continues the sweep"):
        from headway.runtime.law import render_cells, sweep

        settings = load_config(config, [*overrides, f"num_steps={steps}"])
        console.print(render_cells(sweep(settings, out, bounds=bounds, rates=rates, seeds=seeds, say=say)))


@law_app.command(name="fit")
def law_fit(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep.")],
    out: Annotated[Path, typer.Option(help="Where to write the fitted law.")] = Path("law.json"),
    plot: Annotated[Path | None, typer.Option(help="Also draw it to this file (needs the extra plot).")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit η_max(S, T) = min(a/S, b/T) to a sweep, with intervals."""
    with plain_errors():
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
