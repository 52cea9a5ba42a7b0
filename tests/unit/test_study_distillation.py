"""The distillation study: what it reads off runs, and that results are never labeled with other settings."""

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("study_distillation", SCRIPTS / "study_distillation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_time_to_a_kl_is_that_of_the_first_smoothed_point_at_or_below_it(study: Any):
    assert study.smooth([4.0, 2.0, 0.0]) == [4.0, 3.0, 2.0]
    assert study.smooth([1.0] * 10 + [11.0])[-1] == 2.0
    curve = [(1.0, 0.5), (2.0, 0.2), (3.0, 0.1)]
    assert study.seconds_to(0.2, curve) == 2.0
    assert study.seconds_to(0.05, curve) == float("inf")


def test_a_cell_is_the_mean_over_seeds_with_half_their_range(study: Any):
    cell = study.summary([{"accuracy": a, "curve": [(0.0, a)]} for a in (0.5, 0.75)])
    assert cell == {"curves": [[(0.0, 0.5)], [(0.0, 0.75)]], "accuracy": 0.625, "accuracy_spread": 0.125}


def test_a_stored_result_of_other_settings_is_refused_by_name(study: Any, tmp_path: Path):
    (tmp_path / "cell-0.json").write_text(json.dumps({"sets": ["seed=0"], "accuracy": 0.5}))
    assert study.kept(study.in_the_lab, tmp_path / "cell-0", ["seed=0"]) == {"accuracy": 0.5}
    with pytest.raises(SystemExit, match=r"cell-0.json was made with other settings than \['seed=1'\]"):
        study.kept(study.in_the_lab, tmp_path / "cell-0", ["seed=1"])


def test_the_variance_is_taken_at_every_width_that_divides_the_draws_of_the_run(study: Any, monkeypatch: Any):
    class FakeLab:
        def __init__(self, config: Any, task: object) -> None:
            self.learner = SimpleNamespace(model=None, train=lambda batch: None)

        def batches(self) -> Iterator[int]:
            return itertools.count()

    monkeypatch.setattr(study, "Lab", FakeLab)
    monkeypatch.setattr(study, "open_task", lambda config, say: None)
    monkeypatch.setattr(study, "gradient_variance", lambda model, batch, method, widths: dict.fromkeys(widths, 0.0))
    found = study.variance_in_the_lab(Path("nowhere"), ["distill.num_draws=6", "num_steps=2"])
    assert list(found) == ["m=1", "m=2", "m=3"]
