"""`headway doctor`: what this machine supports and lacks, and how far engine and learner disagree."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from headway.cli_common import AsJson, Sets, console, loading, plain_errors, say


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
    loading("the libraries of this machine")
    from headway.engine.support import ENGINES, SUPPORT
    from headway.runtime.doctor import examine

    findings = examine()
    if as_json:
        support = {name: dict(zip(ENGINES, notes, strict=True)) for name, notes in SUPPORT.items()}
        print(json.dumps({"machine": [asdict(finding) for finding in findings], "engines": support}))
        return
    table = Table("what", "state", "note", title="this machine")
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.note)
    console.print(table, markup=False)
    table = Table("", *ENGINES, title="what each engine can do", show_lines=True)
    for feature, notes in SUPPORT.items():
        table.add_row(feature, *notes)
    console.print(table, markup=False)


def _engine_noise(target: str, size: int, config: Path | None, overrides: list[str], as_json: bool) -> None:
    with plain_errors():
        loading(target)
        from headway.report.noise import noise_tables
        from headway.runtime.noise import measure_noise

        noise = measure_noise(target, size=size, config_path=config, overrides=overrides, say=say)
        if as_json:
            print(json.dumps(asdict(noise)))
            return
        for part in noise_tables(asdict(noise)):
            console.print(part, markup=False, highlight=False)
