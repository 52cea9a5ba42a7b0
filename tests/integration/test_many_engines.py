"""Three engines, of which one is stopped for a while and one is killed: the rest goes on, and everything adds up."""

import os
import signal
from pathlib import Path

import pytest
from runs import Running, ledger, records, train_arguments, wait_for

STEPS = 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_slow_and_one_dead_engine_do_not_stop_the_rest(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {"num_steps": STEPS, "engines__num_engines": 3, "engines__stall_s": 1, "engines__update_patience_s": 1}
    arguments = train_arguments(run, model, task__latency_s=0.05, evaluation__every=50, **settings)
    running = Running.start(*arguments, log=log)
    wait_for(lambda: steps_of(run) >= 3, limit_s=150, what=f"first steps: {log.read_text()[-2000:]}")
    stopped, killed, _ = running.engines()
    os.kill(stopped.pid, signal.SIGSTOP)
    # More steps than the bound would let through if anyone waited for the stopped one.
    before = steps_of(run)
    wait_for(lambda: steps_of(run) >= before + 8, limit_s=150, what=f"steps beside it: {log.read_text()[-2000:]}")
    wait_for(lambda: "asking other engines" in log.read_text(), limit_s=60, what="word of the silent engine")
    before = steps_of(run)
    wait_for(lambda: steps_of(run) >= before + 8, limit_s=150, what=f"steps without it: {log.read_text()[-2000:]}")
    os.kill(stopped.pid, signal.SIGCONT)
    wait_for(lambda: "answers again" in log.read_text(), limit_s=60, what="word of its return")
    killed.kill()
    wait_for(lambda: running.process.poll() is not None, limit_s=200, what=f"end: {log.read_text()[-2000:]}")
    text = " ".join(log.read_text().split())
    assert running.process.returncode == 0, text
    assert "has not answered for 1 s; asking other engines for what it was generating" in text

    steps = records(run, "step")
    assert [record["step"] for record in steps] == list(range(STEPS))
    assert max(record["engine_lag_max"] for record in steps) > 2  # beyond the bound, yet no token was
    assert min(record["num_engines_serving"] for record in steps) == 2
    assert steps[-1]["num_restarts"] == 1
    audit = ledger(run)
    assert audit["samples"]["trained"] == audit["samples_issued"] == STEPS * 16
    assert max(map(int, audit["token_staleness"])) <= 2


def steps_of(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0
