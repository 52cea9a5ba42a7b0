"""Stops and damage: an orderly end, a refusal that names the mend, and a run that goes on after it."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from runs import Running, headway, ledger, records, train_arguments, wait_for


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_stopped_run_survives_a_damaged_checkpoint_and_refuses_to_become_another(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    running = Running.start(*train_arguments(run, model, num_steps=40, task__latency_s=0.2), log=log)
    wait_for(lambda: (run / "checkpoints" / "version-000006").exists(), limit_s=90, what="checkpoint of version 6")
    engines = running.engines()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 130, log.read_text()
    assert "headway resume" in log.read_text()
    assert not any(psutil.pid_exists(engine.pid) for engine in engines)
    for memory in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        assert not list(memory.glob(f"headway-weights-{running.process.pid}-*"))

    newest = max((run / "checkpoints").glob("version-*"))
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-20] ^= 1
    weights.write_bytes(data)
    refused = headway("resume", run)
    assert refused.returncode == 1
    assert "is damaged (model.safetensors); delete it and resume" in refused.stderr

    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("seed = 0", "seed = 7"))
    refused = headway("resume", run)
    assert refused.returncode == 1 and "config.toml has seed = 7, but the run was started with 0" in refused.stderr
    (run / "config.toml").write_text(config)

    shutil.rmtree(newest)
    result = headway("resume", run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ledger(run)["samples"]["trained"] == 40 * 16
    assert [record["step"] for record in records(run, "step")] == list(range(40))
    seen = [(record["split"], record["policy_version"]) for record in records(run, "evaluation")]
    assert len(seen) == len(set(seen))


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_an_orderly_stop_saves_a_checkpoint_so_that_nothing_is_trained_again(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run, model, num_steps=40, task__latency_s=0.1, checkpoint__every=1000, evaluation__every=0
    )
    running = Running.start(*arguments, log=log)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run, "step")) >= 5, limit_s=90, what="steps")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 130, log.read_text()
    assert "stopping after the step in hand" in log.read_text() and "headway resume" in log.read_text()
    num_done = len(records(run, "step"))
    assert (run / "checkpoints" / f"version-{num_done:06d}").is_dir()
    assert ledger(run)["num_steps"] == num_done < 40
    result = headway("resume", run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "steps again" not in result.stdout
    assert not any(record.get("redone") for record in records(run, "step"))
    assert ledger(run)["samples"]["trained"] == 40 * 16


@pytest.mark.timeout(200)
def test_a_stop_before_the_first_step_is_as_orderly(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    never = {"task__latency_s": 1000, "evaluation__every": 0, "evaluation__test_size": 0, "wait_limit_s": 1}
    running = Running.start(*train_arguments(run, model, **never), log=log)
    wait_for(lambda: "learner has waited" in log.read_text(), limit_s=90, what="a learner without groups")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 130, log.read_text()
    assert "headway resume" in log.read_text() and "Traceback" not in log.read_text()
    assert ledger(run)["samples_issued"] > 0 and ledger(run)["num_steps"] == 0


@pytest.mark.timeout(200)
def test_a_second_signal_stops_at_once(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(run, model, num_steps=4000, checkpoint__every=1000)
    running = Running.start(*arguments, log=log)
    wait_for(lambda: (run / "metrics.jsonl").exists() and records(run, "step"), limit_s=90, what="a step")
    # No version arrives any more, so the step in hand cannot end.
    for engine in running.engines():
        os.kill(engine.pid, signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping after the step in hand" in log.read_text(), limit_s=60, what="word of it")
    time.sleep(1)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    ledger(run)


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_an_engine_that_lives_but_does_not_answer_is_replaced(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run, model, num_steps=80, task__latency_s=0.05, engines__update_timeout_s=4, wait_limit_s=1
    )
    running = Running.start(*arguments, log=log)
    wait_for(lambda: running.engines() and (run / "metrics.jsonl").exists(), limit_s=60, what="engine")
    wait_for(lambda: records(run, "step"), limit_s=60, what="first step")
    os.kill(running.engines()[0].pid, signal.SIGSTOP)
    wait_for(lambda: running.process.poll() is not None, limit_s=100, what=f"end: {log.read_text()[-1500:]}")
    text = " ".join(log.read_text().split())
    assert running.process.returncode == 0, text
    assert "did not answer" in text and "starvation: " in text
    assert ledger(run)["samples"]["trained"] == 80 * 16
