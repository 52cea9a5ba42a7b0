"""Faults done to whole runs on the tiny model, one run a fault: what survived, what was lost, what hung.

    python scripts/chaos.py [--only NAME …] [--keep FOLDER]

Every run is a real `headway train` whose ledger is audited after each end; one that stops is resumed. Prints a table,
then one JSON line; exit 1 when a run did not survive, a sample was lost or something hung.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from chaos_faults import FAULTS
from chaos_runs import Outcome, undergo
from runs import small_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--keep", type=Path, help="Leave the run folders here.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        model = small_model(folder / "model")
        outcomes = []
        for name in options.only:
            outcomes.append(undergo(FAULTS[name], folder / name, model))
            print(name, outcomes[-1], file=sys.stderr, flush=True)
    report(outcomes)
    sys.exit(any(not o.survived or o.lost or o.num_hangs or o.note for o in outcomes))


def report(outcomes: list[Outcome]) -> None:
    table = Table("fault", "done", "resumes", "survived", "samples lost", "hangs", "s", "note")
    for o in outcomes:
        survived = "yes" if o.survived else "NO"
        cells = (o.num_faults, o.num_resumes, survived, o.lost, o.num_hangs, round(o.seconds), o.note[:200])
        table.add_row(o.what, *map(str, cells))
    total = sum(o.num_faults for o in outcomes)
    survived = sum(o.survived for o in outcomes)
    lost, hangs = sum(o.lost for o in outcomes), sum(o.num_hangs for o in outcomes)
    table.add_row("all", str(total), "", f"{survived} of {len(outcomes)} runs", str(lost), str(hangs), "", "")
    Console(width=160).print(table, markup=False)
    print(json.dumps({"chaos": [asdict(o) for o in outcomes]}))


if __name__ == "__main__":
    main()
