"""The study's own loop trains what a run with an exact lag trains, and its measures are right."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import SMALL, small_model, train
from safetensors.torch import load_file, save_file

from headway.config import load_config
from headway.runtime.recording import read_batch
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import open_task

SCRIPTS = Path(__file__).parents[2] / "scripts"

SETTINGS = {"distill.num_draws": 8, "num_steps": 5, "optimizer.lr": 1e-2, "guard.action": "off"}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The student's shape with other weights, sharp enough to have opinions."""
    file = small_model(tmp_path / "teacher") / "model.safetensors"
    torch.manual_seed(1)
    save_file({k: t + 0.3 * torch.randn_like(t) for k, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return file.parent


@pytest.fixture
def lab(model: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    settings = SMALL | SETTINGS | {"model.path": model, "distill.teacher": teacher}
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    return importlib.import_module("distillation_lab").Lab(config, open_task(config, say=print))


def test_every_batch_is_as_old_as_it_should_be_and_scored_by_the_teacher(lab: Any):
    ages = []
    for batch in lab.batches():
        ages += [batch.policy_version - version for r in batch.responses for version in set(r.versions.tolist())]
        group = batch.groups[0]
        ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, group.responses[0].token_ids]).astype(np.int64))
        with torch.no_grad():
            states = lab.teacher(ids[None]).logits[0, len(group.prompt.token_ids) - 1 : -1]
        own = states.log_softmax(-1).gather(1, ids[len(group.prompt.token_ids) :, None])
        assert np.allclose(group.responses[0].side.teacher_logprobs[:, :1], own, atol=1e-5)
        lab.learner.train(batch)
    assert ages == [min(step, 2) for step in range(5) for _ in range(16)]


def test_it_trains_what_a_run_with_an_exact_lag_trains(lab: Any, model: Path, teacher: Path, tmp_path: Path):
    """The same tokens from the same versions, and so the same parameters but for the order of sums."""
    settings = {"distill__teacher": str(teacher), **{key.replace(".", "__"): value for key, value in SETTINGS.items()}}
    run = tmp_path / "run"
    train(run, model, exact_lag=True, record=True, evaluation__every=0, **settings)
    folder, _ = RunFolder.open(run)
    for step, batch in enumerate(lab.batches()):
        recorded = read_batch(folder.batches, step)
        for mine, theirs in zip(batch.responses, recorded.responses, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.versions, theirs.versions)
            np.testing.assert_array_equal(mine.side.draw_ids, theirs.side.draw_ids)
            for found, wanted in (
                (mine.behavior_logprobs, theirs.behavior_logprobs),
                (mine.side.teacher_logprobs, theirs.side.teacher_logprobs),
            ):
                assert found is not None and wanted is not None
                np.testing.assert_allclose(found, wanted, atol=1e-4)
        lab.learner.train(batch)
    trained = load_file(folder.checkpoint(5) / "model.safetensors")
    started = load_file(model / "model.safetensors")
    ours = dict(lab.learner.weights())
    moved = max(float((trained[name] - started[name]).abs().max()) for name in trained)
    assert moved > 1e-2
    for name, tensor in trained.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=moved / 100)


def test_the_variance_of_the_gradient_falls_as_one_over_m(lab: Any):
    scores = importlib.import_module("distillation_scores")
    batch = next(lab.batches())
    found = scores.gradient_variance(lab.learner.model, batch, "mc_recomputed", [1, 2, 4])
    assert found[1] == pytest.approx(2 * found[2], rel=0.5) and found[1] == pytest.approx(4 * found[4], rel=0.5)
    with pytest.raises(ValueError, match="8 draws at a position make no whole number of sets of 3"):
        scores.gradient_variance(lab.learner.model, batch, "mc_recomputed", [3])


def test_a_model_is_at_no_distance_from_itself(lab: Any):
    scores = importlib.import_module("distillation_scores")
    kl = scores.exact_kl(lab.teacher, lab.teacher, lab._task.environment, num_prompts=9, max_tokens=3)
    assert kl == (0.0, 0.0)
