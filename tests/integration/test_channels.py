"""A run over each channel that keeps state between versions: an engine dies, the run dies, and nothing is lost."""

from pathlib import Path

import psutil
import pytest
from runs import Running, assert_moving, headway, ledger, records, train_arguments, wait_for

STEPS = 80


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["delta", "collective"])
@pytest.mark.timeout(500)
def test_a_run_survives_the_death_of_an_engine_and_its_own(weights: str, model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {"weights": weights, "num_steps": STEPS, "record": True, "engines__num_engines": 2}
    arguments = train_arguments(run, model, task__latency_s=0.4, evaluation__every=0, **settings)
    running = Running.start(*arguments, log=log)
    wait_for(lambda: steps_of(run) >= 3, limit_s=150, what=f"first steps: {log.read_text()[-2000:]}")
    running.engines()[0].kill()
    wait_for(lambda: has_restarted(run), limit_s=150, what=f"a restarted engine: {log.read_text()[-2000:]}")
    left = running.kill()
    wait_for(lambda: not any(psutil.pid_exists(engine.pid) for engine in left), limit_s=60, what="end of engines")
    resumed = headway("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [record["step"] for record in records(run, "step")] == list(range(STEPS))
    assert ledger(run)["samples"]["trained"] == STEPS * 16
    assert_moving(run, least=0.2)
    replayed = headway("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    if weights == "delta":
        text = " ".join(log.read_text().split())
        assert "this engine holds nothing; sending version" in text, text


def steps_of(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0


def has_restarted(run: Path) -> bool:
    last = records(run, "step")[-1]
    return last["num_restarts"] == 1 and last["num_engines_serving"] == 2
