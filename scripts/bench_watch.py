"""What `headway watch` takes from the machine on which a run trains: CPU seconds over those of the run and its engines.

    python scripts/bench_watch.py --steps 80

Trains a run, watches it, and asks as an open page does, every two seconds. The watch is a process of its own that the
run never waits for; it costs a run the cores it keeps busy, this share at most where all of them are. Prints two lines
and one JSON line.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from headway.report.watch import POLL_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as place, ExitStack() as children:
        run = Path(place) / "run"
        training = start(children, "train", f"--run={run}", f"--set=num_steps={steps}")
        while not (run / "metrics.jsonl").exists() and not has_ended(training):
            time.sleep(0.1)
        begun = time.monotonic()
        watching = start(children, "watch", str(run), "--port=0", stderr=subprocess.PIPE)
        url = address(watching).replace("/?", "/report?")
        seen, num_news = "", 0
        while not has_ended(training):
            stamp = ask(url, seen)
            seen, num_news = stamp or seen, num_news + (stamp is not None)
            time.sleep(POLL_S)
        seconds = time.monotonic() - begun
        run_s = cpu_s(training, 0)
        watching.send_signal(signal.SIGINT)
        watch_s = cpu_s(watching, 130)
    print(f"watch: {watch_s:.1f} s of CPU in {seconds:.0f} s, {num_news} redraws")
    print(f"that is {watch_s / run_s:.1%} of the {run_s:.0f} s of the run and its engines")
    print(json.dumps({"watch_cpu_s": watch_s, "run_cpu_s": run_s, "seconds": seconds, "redraws": num_news}))


def start(children: ExitStack, *command: str, stderr: int | None = None) -> "subprocess.Popen[str]":
    """A command of Headway's, killed on the way out if it has not ended."""
    argv = [sys.executable, "-m", "headway", *command]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=stderr, text=True)
    children.callback(lambda: child.returncode is None and child.kill())
    return child


def has_ended(child: "subprocess.Popen[str]") -> bool:
    """Whether it has; it can still be waited for."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def cpu_s(child: "subprocess.Popen[str]", code: int) -> float:
    """Of a child that has ended or is about to, with the processes it waited for; it must end with this code."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != code:
        raise SystemExit(f"{child.args} ended with {child.returncode}, not {code}")
    return usage.ru_utime + usage.ru_stime


def address(watching: "subprocess.Popen[str]") -> str:
    """That it prints among its first words."""
    assert watching.stderr is not None
    for line in watching.stderr:
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise SystemExit("the watch gave no address")


def ask(url: str, seen: str) -> str | None:
    """The stamp of what is new; None when nothing is."""
    with urllib.request.urlopen(f"{url}&seen={quote(seen)}", timeout=60) as answer:
        return json.load(answer)["stamp"] if answer.status == 200 else None


if __name__ == "__main__":
    main()
