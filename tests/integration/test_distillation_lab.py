"""The study's own loop trains what a run with an exact lag trains, and its measures are right."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import SMALL, small_model
from safetensors.torch import load_file, save_file

from headway.config import load_config
from headway.runtime.task import open_task

SCRIPTS = Path(__file__).parents[2] / "scripts"


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
    sets = [f"{key}={value}" for key, value in SMALL.items()]
    sets += [f"model.path={model}", f"distill.teacher={teacher}", "distill.num_draws=8"]
    config = load_config(None, [*sets, "num_steps=5", "optimizer.lr=1e-2", "guard.action=off"])
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


def test_the_variance_of_the_gradient_falls_as_one_over_m(lab: Any):
    scores = importlib.import_module("distillation_scores")
    found = scores.gradient_variance(lab.learner.model, next(lab.batches()), "mc_recomputed", [1, 2, 4])
    assert found[1] == pytest.approx(2 * found[2], rel=0.5) and found[1] == pytest.approx(4 * found[4], rel=0.5)


def test_a_model_is_at_no_distance_from_itself(lab: Any):
    scores = importlib.import_module("distillation_scores")
    kl = scores.exact_kl(lab.teacher, lab.teacher, lab._task.environment, num_prompts=9, max_tokens=3)
    assert kl == (0.0, 0.0)
