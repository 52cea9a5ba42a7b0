"""A sweep of real runs: ordinary run folders, resumed where it stopped, classified and fitted; its law sets a rate."""

import json

import pytest

pytest.importorskip("scipy")

from runs import SMALL, headway, records, train

from headway.planner.law import Cell, fit
from headway.runtime.law import LAW_SCHEMA, apply_law, read_cells
from headway.runtime.law_settings import belongs_to
from headway.runtime.run_folder import RunFolder


def _sets(model, **more) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in (SMALL | {"model.path": str(model)} | more).items()]


@pytest.mark.runs
@pytest.mark.slow
def test_a_sweep_is_run_once_and_its_runs_are_ordinary_run_folders(tmp_path, model):
    grid = ["--staleness=0", "--staleness=2", "--lr=1e-4", "--steps=10", f"--out={tmp_path}"]
    first = headway("law", "sweep", *grid, *_sets(model))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1/1" in first.stdout
    runs = sorted(path.name for path in tmp_path.iterdir())
    assert runs == ["S0-lr0.0001-T10-seed0", "S2-lr0.0001-T10-seed0"]
    assert RunFolder.open(tmp_path / runs[1])[1].exact_lag  # or the cell would be named after a lag it never had
    written = (tmp_path / runs[1] / "metrics.jsonl").stat().st_mtime_ns
    again = headway("law", "sweep", *grid, *_sets(model))
    assert again.returncode == 0 and "min left" not in again.stderr
    assert (tmp_path / runs[1] / "metrics.jsonl").stat().st_mtime_ns == written
    assert [c.max_staleness for c in read_cells(tmp_path)] == [0, 2]
    other = headway("law", "sweep", *grid, *_sets(model), "--set=batch_size=32")
    assert other.returncode == 1 and "batch_size = 16, not 32" in other.stderr
    none = headway("law", "fit", tmp_path, "--algorithm=estr", f"--out={tmp_path / 'law.json'}")
    assert none.returncode == 1 and "no ended run of estr" in none.stderr
    unfit = headway("law", "fit", tmp_path, "--algorithm=grpo", f"--out={tmp_path / 'law.json'}")
    assert unfit.returncode == 1 and "sweep larger learning rates" in unfit.stderr


def test_a_fitted_law_sets_and_caps_the_rate_of_a_run(tmp_path, model):
    train(tmp_path / "run", model, num_steps=2)
    _, config = RunFolder.open(tmp_path / "run")
    law = fit([Cell(s, lr, 2, lr > 1e-3 / max(1, s)) for s in (0, 1, 2, 4) for lr in (1e-5, 1e-4, 4e-4, 2e-3, 1e-2)])
    file = tmp_path / "law.json"
    file.write_text(json.dumps({"schema": LAW_SCHEMA, "belongs_to": belongs_to(config), "law": law.to_dict()}))
    said: list[str] = []
    for lr, expected in (("law", law.recommend(2, 2)), (1.0, law.recommend(2, 2)), (1e-7, 1e-7)):
        optimizer = config.optimizer.model_copy(update={"lr": lr, "law": str(file)})
        applied = apply_law(config.model_copy(update={"optimizer": optimizer}), said.append)
        assert applied.optimizer.peak == pytest.approx(expected)
        assert applied.guard.budget == law.a.low
    assert not any("may not transfer" in text for text in said)
    train(tmp_path / "lawful", model, num_steps=2, optimizer__lr="law", optimizer__law=str(file))
    assert records(tmp_path / "lawful", "step")[0]["learning_rate"] == pytest.approx(law.recommend(2, 2))


def test_a_sweep_whose_lag_could_not_be_exact_is_refused(tmp_path, model):
    refused = headway("law", "sweep", f"--out={tmp_path}", "--set=over_bound=drop", *_sets(model))
    assert refused.returncode == 1 and 'exact_lag needs over_bound = "wait"' in refused.stderr
    assert not list(tmp_path.iterdir())


def test_law_without_a_file_is_refused(tmp_path, model):
    refused = headway("train", f"--run={tmp_path / 'run'}", *_sets(model, **{"optimizer.lr": "law"}))
    assert refused.returncode == 1
    assert 'optimizer.lr = "law" needs optimizer.law' in refused.stderr
