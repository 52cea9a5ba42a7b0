"""The study script: results are never labeled with settings they were not made with, and short runs are summed up."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.runtime.run_folder import RunFolder

SCRIPT = Path(__file__).parents[2] / "scripts" / "study_methods.py"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("study_methods", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stored_run_with_other_settings_is_refused_by_name(study: Any, tmp_path: Path):
    RunFolder.create(tmp_path / "run", load_config(None, ["seed=1", "num_steps=5"]))
    study.refuse_other_settings(tmp_path / "run", ["seed=1", "num_steps=5"])
    with pytest.raises(SystemExit, match=r"other settings.*num_steps = 5, not 6"):
        study.refuse_other_settings(tmp_path / "run", ["seed=1", "num_steps=6"])


@pytest.mark.parametrize(("num_steps", "lowest"), [(3, 0.0), (10, 0.0), (12, 10.0)])
def test_the_lowest_reward_skips_ten_steps_where_there_are_more(study: Any, num_steps: int, lowest: float):
    tests = [{"kind": "evaluation", "split": "test", "accuracy": a} for a in (0.1, 0.2)]
    steps = [{"kind": "step", "reward": float(i), "staleness_token_mean": 1.0} for i in range(num_steps)]
    assert study.outcome([*tests, *steps])["lowest_reward"] == lowest
