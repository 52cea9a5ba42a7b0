"""The scripts behind docs/planner.md go on saying what they say there."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("simpy")
pytest.importorskip("scipy")

from simulated_runs import LOADED, TRUE, written

from headway.config import load_config
from headway.runtime import learned_costs

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module(name)


def test_runs_that_cost_what_is_simulated_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    validate = script("validate_planner", monkeypatch)
    monkeypatch.setattr(learned_costs, "_num_cores", lambda config: 4)
    monkeypatch.setattr(validate, "NUM_SIMULATED", 1)
    settings = {"sync": TRUE, "sync-slots8": replace(TRUE, num_slots=8), "async": LOADED}
    for name, setup in (settings | {"bound1": replace(LOADED, max_staleness=1)}).items():
        written(tmp_path / f"{name}-0", setup, num_steps=40)
    validate.check(tmp_path, list(settings))
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["run"] == "bound1"
    assert abs(row["rate_error"]) < 0.1 and abs(row["staleness_error"]) < 0.1


def test_every_setting_that_the_planner_is_validated_on_is_one_that_runs_accept(monkeypatch: pytest.MonkeyPatch):
    validate = script("validate_planner", monkeypatch)
    for task in validate.TASKS.values():
        for settings in validate.GRID.values():
            chosen = validate.COMMON | task | settings
            load_config(None, [f"{key}={json.dumps(value)}" for key, value in chosen.items()])


def test_an_asynchronous_system_gains_what_training_leaves_idle(monkeypatch: pytest.MonkeyPatch):
    estr = script("validate_published_estr", monkeypatch)
    monkeypatch.setattr(estr, "GROUPS", 4)
    little, much = estr.predict(0.2, 0.5, 0.0), estr.predict(0.6, 0.5, 0.0)
    # Of three fifths of training nothing can be hidden but the other two.
    assert 1 < much["coloc"] < 1 / 0.6 < little["coloc"]
