"""When the guard of each run first warned, when its accuracy was first halved, and when the run collapsed, if it did.

    python scripts/guard_lead.py RUNS

RUNS is the folder `runs` of a study whose `guard.action` is not "off". Prints a table, then one JSON line. *Halved* is
the first version whose held-out accuracy is below half of the best so far, *collapsed* the step from which a run stays
so. The lead counts versions from the one that the step of the first warning made to the halved one: above 0, the guard
warned before half was lost. Evaluate at every step, or both are dated to the next evaluation.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.planner.collapse import collapsed_at
from headway.report.jsonl import read_records
from headway.runtime.run_folder import RunFolder
from headway.runtime.trials import ending
from headway.study.outcome import Ending, accuracy_curve
from headway.training.guard import SIGNS


def look(path: Path, end: Ending) -> dict[str, Any]:
    folder, config = RunFolder.open(path)
    every = list(read_records(folder.metrics_path))
    steps = [r for r in every if r["kind"] == "step"]
    warned = [s for s in steps if s.get("guard_signs")]
    scores, rewards = accuracy_curve(every), [s["reward"] for s in steps]
    halved = halved_at(scores)
    fell = collapsed_at(rewards, scores, num_steps=config.num_steps, finished=end.state == "finished")
    return {
        "run": path.name,
        "warned_at": warned[0]["step"] if warned else None,
        "signs": [sign for i, sign in enumerate(SIGNS) if warned and int(warned[0]["guard_signs"]) >> i & 1],
        "halved_at": halved,
        "collapsed_at": fell,
        "lead": halved - warned[0]["step"] - 1 if warned and halved is not None else None,
        "rate": steps[-1].get("guard_lr_scale") if steps else None,
        "end": scores[max(scores)] if scores else None,
    }


def halved_at(scores: Mapping[int, float]) -> int | None:
    """The first version below half of the best so far.

    >>> halved_at({0: 0.6, 1: 0.7, 2: 0.34, 3: 0.6}), halved_at({0: 0.5, 1: 0.4})
    (2, None)
    """
    best = 0.0
    for version in sorted(scores):
        if scores[version] < best / 2:
            return version
        best = max(best, scores[version])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    paths = sorted(parser.parse_args().runs.glob("*/"))
    found = [look(path, end) for path in paths if (end := ending(path)) and end.state != "failed"]
    if not found:
        raise SystemExit("no ended run there; name the folder `runs` of a study")
    table = Table("run", "first warning", "by", "halved", "lead", "collapsed", "rate ×", "accuracy at the end")
    for row in found:
        cells = (row[name] for name in ("warned_at", "signs", "halved_at", "lead", "collapsed_at", "rate", "end"))
        table.add_row(
            row["run"], *("–" if c in (None, []) else ", ".join(c) if isinstance(c, list) else f"{c:g}" for c in cells)
        )
    Console(width=140).print(table)
    print(json.dumps({"guard_lead": found}))


if __name__ == "__main__":
    main()
