"""Faults done to whole runs, as `make chaos` does them all; one in the default suite."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_faults import FAULTS
from chaos_runs import left_behind

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
QUICK = ["nan_weights"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="one", marks=pytest.mark.timeout(600)),
        pytest.param(
            sorted(FAULTS.keys() - set(QUICK)), id="the rest", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]
        ),
    ],
)
def test_runs_survive_what_is_done_to_them(names: list[str]):
    done = subprocess.run([sys.executable, SCRIPT, "--only", *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])["chaos"]
    assert len(outcomes) == len(names)
    for outcome in outcomes:
        assert outcome["num_faults"] > 0, "nothing was broken"
        assert outcome["survived"] and not outcome["lost"] and not outcome["num_hangs"]


def test_a_process_that_outlives_its_run_is_found():
    with subprocess.Popen(["sh", "-c", "sleep 0.5 & sleep 100 &"], process_group=0) as leader:
        leader.wait()
    try:
        assert left_behind(leader.pid, patience_s=1.5) == ["sleep 100"]
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
    assert left_behind(leader.pid) == []
