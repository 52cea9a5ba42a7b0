"""A writer killed with SIGKILL at any moment leaves a ledger that adds up and can be continued."""

import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from headway.accounts import Audit, audit_file
from headway.ledger import Ledger

WRITER = """
import sys
from pathlib import Path
import numpy as np
from headway.ledger import Ledger
from headway.types import Response

path = Path(sys.argv[1])
ledger = Ledger(path, group_size=4, create=not path.exists())
start = ledger.recover(-1 if sys.argv[2] == "-1" else int(sys.argv[2]))
step = start.redo[-1].step + 1 if start.redo else int(sys.argv[2]) + 1
response = Response(
    token_ids=np.arange(20, dtype=np.int32), mask=np.ones(20, bool), versions=np.zeros(20, np.int32), reward=1.0
)
ready = list(start.ready)
for group_id, members in start.partial.items():
    for member in set(range(4)) - set(members):
        ledger.finish(group_id, member, response)
    ready.append(group_id)
print("started", flush=True)
group_id = start.next_group_id
while True:
    ledger.issue(group_id, step)
    ledger.discard(group_id, 1, 5, "engine died")
    for member in range(4):
        ledger.finish(group_id, member, response)
    if group_id % 7 == 3:
        ledger.drop(group_id, "too stale")
    else:
        ready.append(group_id)
    if len(ready) >= 2:
        ledger.commit_step(step, step, ready[:2], token_staleness={step: 160})
        print(step, flush=True)
        if step % 5 == 4:
            ledger.prune(step - 3)
        step += 1
        del ready[:2]
    group_id += 1
"""


def test_a_killed_writer_loses_no_committed_step_and_the_next_one_goes_on(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    rng = random.Random(0)
    pruned = -1
    report: Audit | None = None
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(pruned)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.0, 0.2))
        writer.send_signal(signal.SIGKILL)
        announced = [int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        writer.stdout.close()
        writer.wait()
        report = audit_file(path)
        assert report.ok, report.violations
        with closing(Ledger(path, group_size=4, create=False)) as ledger:
            pruned = max(pruned, *(step - 3 for step in range(report.num_steps) if step % 5 == 4), -1)
            redo = [step.step for step in ledger.recover(pruned).redo]
        assert redo == list(range(pruned + 1, report.num_steps))
        assert not announced or announced[-1] < report.num_steps
    assert report is not None
    assert report.num_steps > 0 and report.samples["trained"] == 8 * report.num_steps
