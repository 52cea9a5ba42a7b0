"""The learner's step toward a teacher: independent of micro-batches, with the gradient of the KL it claims."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import assert_same, batch, learner_of, parameters_after

from headway.algorithms import DISTILLATIONS, teacher_diagnostics
from headway.cache import bytes_per_token, cached_ids, rollout_logprobs, student_ids
from headway.training.objectives import DistillationObjective, Objective, PolicyObjective, WeightedSum
from headway.types import Batch, Response, SideData

VOCABULARY = 20
SIZE = 3


def scored(response: Response, rng: np.random.Generator) -> Response:
    """With every cache at once, as an engine and a teacher would leave it: a response is read by one kind only."""
    shape = len(response.token_ids), SIZE
    ids = [rng.integers(0, VOCABULARY, shape).astype(np.int32) for _ in range(3)]
    logprobs = [rng.normal(-3, 0.3, (shape[0], n)).astype(np.float32) for n in (SIZE, SIZE, 1 + SIZE)]
    side = SideData(
        draw_ids=ids[0],
        draw_logprobs=logprobs[0],
        top_ids=ids[1],
        top_logprobs=logprobs[1],
        teacher_ids=ids[2],
        teacher_logprobs=logprobs[2],
    )
    return replace(response, side=side)


def scored_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    plain = batch(seed)
    groups = [replace(g, responses=tuple(scored(r, rng) for r in g.responses)) for g in plain.groups]
    return replace(plain, groups=tuple(groups))


def distillation(method: str, **params: Any) -> Objective:
    return WeightedSum({"distill": (1.0, DistillationObjective(method, params))})


def joint(method: str, algorithm: str = "grpo", **params: Any) -> Objective:
    policy = PolicyObjective(algorithm, params)
    return WeightedSum({"distill": (0.5, DistillationObjective(method, {})), "policy": (2.0, policy)})


@pytest.mark.parametrize("method", DISTILLATIONS)
def test_the_step_does_not_depend_on_the_micro_batch_split(method: str):
    for objective in (distillation(method), joint(method), joint(method, "m2po")):
        whole = parameters_after(learner_of(objective), scored_batch(1))
        split = parameters_after(learner_of(objective, micro_batch_tokens=12), scored_batch(1))
        assert_same(whole, split)


def test_the_joint_gradient_is_the_weighted_sum_of_both():
    def gradient(objective: Objective) -> list[torch.Tensor]:
        one = learner_of(objective)
        one._max_grad_norm = 1e9
        one.train(scored_batch(2))
        return [g.clone() for g in one._previous_gradient]

    both = gradient(joint("mc_recomputed"))
    teacher, reward = gradient(distillation("mc_recomputed")), gradient(PolicyObjective("grpo", {}))
    for sum_, a, b in zip(both, teacher, reward, strict=True):
        torch.testing.assert_close(sum_, 0.5 * a + 2.0 * b, rtol=1e-4, atol=1e-7)


def test_a_joint_step_reports_both_losses_under_names_of_their_own():
    metrics = learner_of(joint("mc_clipped")).train(scored_batch(1)).metrics
    assert metrics["loss"] == pytest.approx(0.5 * metrics["distill_loss"] + 2 * metrics["policy_loss"], rel=1e-5)
    assert {"teacher_kl", "teacher_kl_k1", "distill_stopped_fraction", "stopped_fraction", "ess_tokens"} <= set(metrics)


def test_a_batch_without_scores_is_refused():
    with pytest.raises(ValueError, match="no teacher scores"):
        learner_of(distillation("mc_recomputed")).train(batch(1))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_teacher_kl_is_the_kl_where_every_action_is_drawn_with_its_probability(seed: int):
    raw = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    student, teacher, rollout = raw.log_softmax(-1)
    counts = (rollout.exp() * 40_000).round().long()
    ids = torch.repeat_interleave(torch.arange(6), counts)
    rollout = (counts.double() / counts.sum()).log()  # the draws are then exactly this distribution
    found = teacher_diagnostics(
        student[ids][None, None], teacher[ids][None, None], rollout[ids][None, None], torch.ones(1, 1)
    )
    exact = (student.exp() * (student - teacher)).sum()
    assert float(found["teacher_kl"]) == pytest.approx(float(exact), abs=1e-9)
    assert float(found["teacher_kl_k1"]) == pytest.approx(float(exact), abs=1e-9)


def test_a_cache_begins_with_the_token_itself_and_names_its_bytes():
    response = scored_batch(3).groups[0].responses[0]
    for kind in ("draws", "student_topk", "teacher_topk"):
        assert (cached_ids(kind, response)[:, 0] == response.token_ids).all()
        assert cached_ids(kind, response).shape == (len(response.token_ids), 1 + SIZE)
    assert student_ids("teacher_topk", response).shape[1] == 1
    drawn = rollout_logprobs("draws", response)
    assert drawn is not None and response.behavior_logprobs is not None
    assert (drawn[:, 0] == response.behavior_logprobs).all()
    assert rollout_logprobs("student_topk", response) is None
    assert bytes_per_token("draws", 64) == 768 and bytes_per_token("teacher_topk", 65) == 520
