"""All benchmarks, one after the other: each prints its table; the last line is one JSON object with every number.

    python scripts/bench.py [--quick]

`--quick` leaves out what compares whole training runs, which takes several minutes.
"""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = {
    "engine": ["bench_engine.py", "--quick"],
    "controller": ["bench_controller.py"],
    "weights": ["bench_weights.py"],
    "head": ["bench_head.py", "--heads", "eager", "--repeats", "3"],
    "async": ["bench_async.py"],
    "proximal": ["bench_proximal.py"],
}
TRAINING = ("async", "proximal")


def main() -> None:
    names = [name for name in SCRIPTS if name not in TRAINING or "--quick" not in sys.argv]
    results = {}
    for name in names:
        script, *options = SCRIPTS[name]
        path = Path(__file__).with_name(script)
        done = subprocess.run([sys.executable, path, *options], stdout=subprocess.PIPE, text=True, check=True)
        *shown, last = done.stdout.rstrip().splitlines()
        print("\n".join(shown), flush=True)
        results[name] = json.loads(last)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
