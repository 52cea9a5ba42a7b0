"""kill -9 of any process at any moment: nothing skipped, nothing trained twice, the bound holds."""

import os
import random
import time
from pathlib import Path

import psutil
import pytest
from runs import SMALL, Running, assert_moving, headway, ledger, records, train_arguments, wait_for

from headway import ledger_file

STEPS = 12


@pytest.mark.timeout(300)
def test_a_run_killed_at_random_points_ends_as_if_it_had_not_been(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    rng = seeded()
    start = train_arguments(
        run, model, num_steps=STEPS, record=True, task__latency_s=0.1, evaluation__every=0, evaluation__test_size=0
    )
    running = Running.start(*start, log=log)
    goals = sorted(rng.sample(range(STEPS - 4), 3))
    for victim, goal in zip(rng.sample(["run", "run", "engine"], 3), goals, strict=True):
        wait_for(lambda goal=goal: has_reached(run, goal), limit_s=60, what=f"step {goal}: {log.read_text()[-2000:]}")
        time.sleep(rng.uniform(0, 0.3))
        if victim == "engine":
            wait_for(running.engines, limit_s=30, what="engine")
            running.engines()[0].kill()
            wait_for(lambda hit=running: is_noticed(hit, log), limit_s=30, what="word of its death")
        left = running.kill() if victim == "run" else []
        wait_for(lambda left=left: not any(map(psutil.pid_exists, pids(left))), limit_s=15, what="end of engines")
        audit = ledger(run)  # the law holds in the very state the kill left
        assert audit["samples_issued"] == sum(audit["samples"].values())
        if running.process.poll() is not None:
            running = Running.start("resume", run, log=log)
    wait_for(lambda: running.process.poll() is not None, limit_s=100, what=f"end: {log.read_text()[-2000:]}")
    assert running.process.returncode == 0, log.read_text()
    assert_moving(run)
    audit = ledger(run)
    assert audit["samples"]["trained"] == audit["samples_issued"] == STEPS * int(str(SMALL["batch_size"]))
    assert audit["num_groups"] == STEPS * 4
    assert max(map(int, audit["token_staleness"])) <= int(str(SMALL["max_staleness"]))
    assert [record["step"] for record in records(run, "step")] == list(range(STEPS))
    # The strongest statement: training the recorded batches without a pause gives the very same bits.
    replayed = headway("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_a_dead_engine_is_replaced_and_its_work_asked_for_again(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(run, model, num_steps=80, task__latency_s=0.05, engines__num_engines=2)
    running = Running.start(*arguments, log=log)
    wait_for(lambda: steps_of(run) >= 2, limit_s=60, what="first steps")
    running.engines()[0].kill()
    wait_for(lambda: running.process.poll() is not None, limit_s=100, what=f"end: {log.read_text()[-2000:]}")
    assert running.process.returncode == 0, log.read_text()
    assert "died" in log.read_text()
    assert records(run, "step")[-1]["num_restarts"] == 1
    assert ledger(run)["samples"]["trained"] == 80 * 16


@pytest.mark.runs
def test_two_processes_cannot_write_one_run(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    running = Running.start(*train_arguments(run, model, num_steps=5000), log=log)
    wait_for(lambda: (run / "lock").exists() and steps_of(run) > 0, limit_s=60, what="lock")
    second = headway("resume", run)
    running.kill()
    assert second.returncode == 1
    assert f"is in use by process {running.process.pid}" in second.stderr


def seeded() -> random.Random:
    """HEADWAY_TEST_SEED names other kills, `random` those of no other time; a failure prints which."""
    name = os.environ.get("HEADWAY_TEST_SEED", "0")
    seed = random.SystemRandom().randrange(10**6) if name == "random" else int(name)
    print(f"HEADWAY_TEST_SEED={seed}")
    return random.Random(seed)


def is_noticed(running: Running, log: Path) -> bool:
    """It is replaced; one that had no weights yet ends the run, which can be resumed."""
    return "died" in log.read_text() or running.process.poll() is not None


def has_reached(run: Path, step: int) -> bool:
    """0: it has a ledger, and nothing more need be there."""
    return ledger_file.exists(run / "ledger.sqlite") and steps_of(run) >= step


def steps_of(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0


def pids(processes: list[psutil.Process]) -> list[int]:
    return [process.pid for process in processes]


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_bound_that_the_guard_lowered_stays_lowered_through_a_kill(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    always = {"guard__action": "lower_staleness", "guard__window": 1, "guard__cosine": -2.0}  # 4, 2, 1, 0
    start = train_arguments(
        run,
        model,
        max_staleness=4,
        num_steps=16,
        checkpoint__every=6,
        task__latency_s=0.1,
        evaluation__every=0,
        **always,
    )
    running = Running.start(*start, log=log)
    wait_for(lambda: steps_of(run) >= 8, limit_s=90, what=f"step 8: {log.read_text()[-2000:]}")
    running.kill()
    num_before = steps_of(run)
    result = headway("resume", run)
    assert result.returncode == 0, result.stdout + result.stderr
    after = [record for record in records(run, "step") if record["step"] > num_before]
    assert after and all(record["guard_max_staleness"] == 0 for record in after)
    assert all(set(record["token_staleness"]) == {"0"} for record in after)
