"""What reporting costs a run: CPU seconds inside each part of it, over the CPU seconds of the training process.

`python scripts/bench_reporting.py --steps 40 --sinks tensorboard,wandb,trackio`

Trains once with everything on. Counted are the calls that hold up the learner or the event loop, and the threads that
serve the sinks and draw the live view of a terminal: they run beside them, but take the interpreter from them. CPU time
on both sides, because other work on the machine stretches seconds of the clock; engines are processes of their own and
not in the denominator, nor is time in which training waits, so the share is rather too large than too small. From the
first step to the last. Prints a table, then one JSON line. Fails where a part was never called: it would have been
counted as free.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from headway.config import load_config
from headway.report.jsonl import JsonlSink
from headway.report.sinks import Sinks
from headway.report.terminal import TerminalView
from headway.runtime import reporting
from headway.runtime.run_folder import RunFolder
from headway.runtime.timeline import Timeline
from headway.runtime.wiring import run_to_end

SPENT: dict[str, float] = {}


def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; its CPU time is added up under `name`."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            SPENT[name] = SPENT.get(name, 0.0) + time.thread_time() - begun

    return measured


class Steps:
    """CPU seconds of this process, and of the parts, between the first step and the last, by its records.

    What sinks take to be imported and opened comes before the first step, once a run, and is shown apart.
    """

    def __init__(self) -> None:
        self.num = 0
        self.begun = self.ended = 0.0
        self.before: dict[str, float] = {}
        self.parts: dict[str, float] = {}

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "step":
            self.num += 1
            self.ended = time.process_time()
            if not self.begun:
                self.begun, self.before = self.ended, dict(SPENT)
            self.parts = {name: seconds - self.before.get(name, 0.0) for name, seconds in SPENT.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sinks", default="")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="As in `headway train`.")
    options = parser.parse_args()
    sinks = json.dumps([name for name in options.sinks.split(",") if name])
    settings = load_config(None, [f"num_steps={options.steps}", f"report.sinks={sinks}", *options.overrides])

    reporting.token_profiles = counted("token profiles", reporting.token_profiles)
    JsonlSink.log = counted("metrics.jsonl", JsonlSink.log)
    Timeline.add = counted("timeline", Timeline.add)
    Live.refresh = counted("live view", Live.refresh)
    parts = ["token profiles", "metrics.jsonl", "timeline", "live view"]
    if options.sinks:
        Sinks.log = counted("handing records to sinks", Sinks.log)
        Sinks._guarded = counted("sinks, in their thread", Sinks._guarded)
        parts += ["handing records to sinks", "sinks, in their thread"]

    steps = Steps()
    with tempfile.TemporaryDirectory() as place, (Path(place) / "terminal").open("w") as screen:
        folder = RunFolder.create(Path(place) / "run", settings)
        with TerminalView(settings, console=Console(file=screen, force_terminal=True, width=120)) as view:

            def log(record: Mapping[str, Any]) -> None:
                view.log(record)
                steps.log(record)

            run_to_end(folder, settings, log=log, say=print)
    if missing := [name for name in parts if not steps.parts.get(name)]:
        raise SystemExit(f"never called, so not measured: {', '.join(missing)}")
    spent = steps.ended - steps.begun
    for name, seconds in steps.parts.items():
        print(f"{name:26s} {seconds:8.4f} s  {seconds / spent:7.3%}")
    total = sum(steps.parts.values())
    print(f"{'before the first step':26s} {sum(steps.before.values()):8.4f} s, once")
    print(f"{'all of it':26s} {total:8.4f} s  {total / spent:7.3%} of {spent:.1f} s, {steps.num} steps")
    print(
        json.dumps(
            {
                "share": total / spent,
                "training_cpu_s": spent,
                "num_steps": steps.num,
                "seconds": steps.parts,
                "before": steps.before,
            }
        )
    )


if __name__ == "__main__":
    main()
