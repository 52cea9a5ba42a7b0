"""Runs whose learner has several ranks: the same run as with one, resumed with any number, stopped by a lost rank."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from runs import Running, assert_moving, headway, ledger, records, train, train_arguments, wait_for


def follower(running: Running, rank: int) -> int:
    """Process id of a learner's rank. Rank 0 is the run's own process."""
    for child in psutil.Process(running.process.pid).children():
        if "headway.runtime.follower" in child.cmdline() and f'"rank":{rank},' in child.environ()["HEADWAY_RANK"]:
            return child.pid
    raise AssertionError(f"no rank {rank}")


def lose_a_rank(running: Running, run: Path, log: Path, sign: signal.Signals, *, after: int) -> str:
    """Signal rank 1 once that many steps are logged; what the run says at its end."""
    wait_for(lambda: len(records(run, "step")) >= after, limit_s=150, what=f"step {after}: {log.read_text()[-2000:]}")
    pid = follower(running, 1)
    os.kill(pid, sign)
    wait_for(lambda: running.process.poll() is not None, limit_s=100, what=f"end: {log.read_text()[-2000:]}")
    assert running.process.returncode == 1
    wait_for(lambda: not psutil.pid_exists(pid), limit_s=20, what="end of the rank")
    return " ".join(log.read_text().split())


def set_ranks(run: Path, num_ranks: int) -> None:
    path = run / "config.toml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(f"num_ranks = {num_ranks}" if x.startswith("num_ranks") else x for x in lines))


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_recorded_run_on_two_ranks_replays_bit_by_bit(model: Path, tmp_path: Path):
    train(tmp_path / "run", model, learner__num_ranks=2, record=True, num_steps=4)
    assert_moving(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run/checkpoints/version-000004").glob("optimizer*")) == [
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
    ]
    replayed = headway("replay", tmp_path / "run")
    assert replayed.returncode == 0 and "bit-identical" in replayed.stdout, replayed.stdout + replayed.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_and_a_hung_rank_end_the_run_by_name_and_it_resumes_on_other_numbers_of_ranks(
    model: Path, tmp_path: Path
):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run, model, num_steps=40, learner__num_ranks=3, learner__rank_timeout_s=20, task__latency_s=0.1
    )
    (run / "metrics.jsonl").parent.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    running = Running.start(*arguments, log=log)
    said = lose_a_rank(running, run, log, signal.SIGKILL, after=5)
    assert "learner rank 1 died (exit -9)" in said and "headway resume" in said, said

    set_ranks(run, 2)
    log.write_text("")
    said = lose_a_rank(Running.start("resume", run, log=log), run, log, signal.SIGSTOP, after=12)
    assert "learner rank 1 did not do its part within learner.rank_timeout_s = 20" in said, said

    set_ranks(run, 1)
    done = headway("resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ledger(run)["samples"]["trained"] == 40 * 16
    assert [record["step"] for record in records(run, "step")] == list(range(40))


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_terminal_that_closes_and_a_stop_of_the_whole_group_are_orderly_on_two_ranks(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    never = {"checkpoint__every": 1000, "evaluation__every": 0, "evaluation__test_size": 0}
    arguments = train_arguments(run, model, num_steps=24, learner__num_ranks=2, task__latency_s=0.2, **never)
    (run / "metrics.jsonl").parent.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    for signs, after in (([signal.SIGHUP], 4), ([signal.SIGTERM, signal.SIGTERM], 10)):  # `timeout` signals twice
        running = Running.start(*arguments, log=log, process_group=0)
        wait_for(lambda least=after: len(records(run, "step")) >= least, limit_s=150, what=f"steps: {log.read_text()}")
        children = psutil.Process(running.process.pid).children()
        for sign in signs:
            os.killpg(running.process.pid, sign)
        assert running.process.wait(60) == 130, log.read_text()
        num_done = len(records(run, "step"))
        assert after <= num_done < 24 and (run / "checkpoints" / f"version-{num_done:06d}").is_dir()
        assert len(children) == 2 and not any(psutil.pid_exists(child.pid) for child in children)
        arguments = ["resume", str(run)]
    done = headway("resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "died" not in log.read_text() and "steps again" not in log.read_text() + done.stdout
    assert not any(record.get("redone") or record["num_restarts"] for record in records(run, "step"))
    assert ledger(run)["samples"]["trained"] == 24 * 16
