"""A study of real runs: checked first, run once, continued after a kill, a failure recorded without stopping it."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from runs import SMALL, headway

from headway.config import assign, parse_config
from headway.runtime.run_folder import RunFolder
from headway.runtime.trials import Job, ending, run_all


def study_file(path: Path, model: Path, grid: str, **more: object) -> Path:
    base = {"model.path": str(model), **SMALL, "num_steps": 6, "evaluation.every": 3, **more}
    lines = [f"{key} = {json.dumps(value)}" for key, value in base.items()]
    path.write_text("\n".join(["goal = 0.5", "jobs = 2", "[base]", *lines, "[grid]", grid]))
    return path


def nested(settings: dict[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in settings.items():
        assign(values, key, value, where=key)
    return values


def rows(folder: Path) -> dict[str, tuple]:
    with closing(sqlite3.connect(folder / "results.sqlite")) as connection:
        found = connection.execute("SELECT name, state, reason FROM runs").fetchall()
    return {name: (state, reason) for name, state, reason in found}


def test_wrong_combinations_are_refused_before_anything_runs(tmp_path, model):
    file = study_file(tmp_path / "s.toml", model, 'algorithm = ["grpo", "grop"]\nproximal = ["train_start", "ewma"]')
    refused = headway("study", file, f"--out={tmp_path / 'out'}")
    assert refused.returncode == 1 and not (tmp_path / "out").exists()
    assert "unknown algorithm 'grop'; did you mean 'grpo'?" in refused.stderr
    assert "grpo-ewma" in refused.stderr and "has no proximal policy" in refused.stderr


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path, model):
    (tmp_path / "in-the-way").write_text("")
    file = study_file(tmp_path / "s.toml", model, "seed = [0, 1, 2]")
    refused = headway("study", file, f"--out={tmp_path / 'in-the-way' / 'out'}")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    told = " ".join(refused.stderr.split())
    assert "cannot make" in told and "Not a directory; name another --out" in told


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_killed_study_goes_on_and_a_failed_run_does_not_stop_it(tmp_path, model):
    out = tmp_path / "out"
    file = study_file(tmp_path / "s.toml", model, "seed = [0, 1]")
    command = [sys.executable, "-m", "headway", "study", str(file), f"--out={out}", "--jobs=1"]
    first = subprocess.Popen(command)
    while not list(out.glob("runs/*/metrics.jsonl")) and first.poll() is None:
        time.sleep(0.05)
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    broken = out / "runs" / "seed1" / "metrics.jsonl"  # a run whose folder cannot be used fails by itself
    broken.parent.mkdir()
    broken.write_text("not JSON\n")
    again = headway("study", file, f"--out={out}")
    assert again.returncode == 0, again.stderr
    assert rows(out)["seed0"] == ("finished", "")
    assert rows(out)["seed1"][0] == "failed" and "is not JSON" in rows(out)["seed1"][1]
    assert "0/1 +1 failed" in again.stdout
    assert sorted(path.name for path in out.glob("*.png")) == ["s-curves.png", "s-ends.png"]
    finished = out / "runs" / "seed0" / "metrics.jsonl"
    written = finished.stat().st_mtime_ns
    broken.unlink()
    third = headway("study", file, f"--out={out}", "--retry", "--no-plot", "--json")
    assert third.returncode == 0 and len(json.loads(third.stdout)["runs"]) == 2
    assert rows(out)["seed1"][0] == "finished" and finished.stat().st_mtime_ns == written
    other = study_file(tmp_path / "s.toml", model, "seed = [0, 1]", num_steps=7)
    refused = headway("study", other, f"--out={out}")
    assert refused.returncode == 1 and "num_steps = 6, not 7" in refused.stderr


def test_a_study_that_is_stopped_stops_its_runs(tmp_path, model):
    job = Job(tmp_path / "run", parse_config(nested({**SMALL, "model.path": str(model), "num_steps": 500})))

    def stop(active):
        if (job.path / "metrics.jsonl").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_all([job], num_parallel=1, on_end=lambda job, end: None, on_tick=stop)
    assert ending(job.path) is None
    RunFolder(job.path).lock().close()  # nobody trains there any more


@pytest.mark.runs
def test_a_run_that_outlived_its_study_is_waited_for(tmp_path, model):
    job = Job(tmp_path / "run", parse_config(nested({**SMALL, "model.path": str(model), "num_steps": 2})))
    folder = RunFolder.create(job.path, job.config)
    held, ended = [folder.lock()], []

    def release(active):
        assert held or active or ended
        if held:
            held.pop().close()

    run_all([job], num_parallel=1, on_end=lambda _, end: ended.append(end.state), on_tick=release)
    assert ended == ["finished"]
