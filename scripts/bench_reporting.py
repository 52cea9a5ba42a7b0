"""What reporting costs a run: seconds inside each part of it, over the seconds of training.

`python scripts/bench_reporting.py --steps 40 --sinks tensorboard,wandb,trackio`

Trains once with everything on and times every call of the reporting code: wall seconds where the call holds up the
learner or the event loop, CPU seconds of the thread that serves the sinks (it runs beside them, but takes the
interpreter from them). The share is all of these over the time from the first step to the last, so it counts as lost
even what ran while the learner waited. Prints a table, then one JSON line.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.config import load_config
from headway.report.jsonl import JsonlSink, read_records
from headway.report.sinks import Sinks
from headway.runtime import reporting
from headway.runtime.run_folder import RunFolder
from headway.runtime.timeline import Timeline
from headway.runtime.wiring import run_to_end

SECONDS: dict[str, float] = {}


def timed(name: str, call: Callable[..., Any], clock: Callable[[], float] = time.perf_counter) -> Callable[..., Any]:
    """The same function; its time is added up under `name`."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        begun = clock()
        try:
            return call(*args, **kwargs)
        finally:
            SECONDS[name] = SECONDS.get(name, 0.0) + clock() - begun

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sinks", default="")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="As in `headway train`.")
    options = parser.parse_args()
    sinks = json.dumps([name for name in options.sinks.split(",") if name])
    settings = load_config(None, [f"num_steps={options.steps}", f"report.sinks={sinks}", *options.overrides])

    reporting.token_profiles = timed("token profiles", reporting.token_profiles)
    JsonlSink.log = timed("metrics.jsonl", JsonlSink.log)
    Timeline.add = timed("timeline", Timeline.add)
    Sinks.log = timed("handing records to sinks", Sinks.log)
    Sinks._serve = timed("sinks, CPU of their thread", Sinks._serve, time.thread_time)

    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run", settings)
        run_to_end(folder, settings, log=lambda record: None, say=print)
        steps = [record for record in read_records(folder.metrics_path) if record["kind"] == "step"]
    seconds = sum(record["step_s"] for record in steps[1:])
    for name, spent in SECONDS.items():
        print(f"{name:28s} {spent:8.4f} s  {spent / seconds:8.3%}")
    total = sum(SECONDS.values())
    print(f"{'all of it':28s} {total:8.4f} s  {total / seconds:8.3%} of {seconds:.1f} s, {len(steps)} steps")
    print(json.dumps({"share": total / seconds, "training_s": seconds, "num_steps": len(steps), "seconds": SECONDS}))


if __name__ == "__main__":
    main()
