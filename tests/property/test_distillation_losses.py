"""Distillation on a small categorical, every expectation by exact enumeration of what the cache may hold."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms import DISTILLATIONS, compute_distillation_loss, distillation_statistics

torch.set_num_threads(1)

SOME = settings(max_examples=60, deadline=None)
VOCABULARY = 5
CACHED = sorted(DISTILLATIONS)
seeds = st.integers(0, 2**31)


def logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three_policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits (live), teacher log-probs, rollout log-probs, `[V]` each."""
    raw = logits(seed, 3, VOCABULARY)
    return raw[0].clone().requires_grad_(), raw[1].log_softmax(-1), raw[2].log_softmax(-1)


def expected_gradient(name: str, seed: int, **params: float) -> Tensor:
    """Mean over the draw a ~ p_old of the gradient in the student's logits: one row per action, weighed by p_old."""
    student_logits, teacher, rollout = three_policies(seed)
    ids = torch.arange(VOCABULARY).view(-1, 1, 1)
    inputs = {
        "student_logprobs": student_logits.log_softmax(-1)[ids],
        "teacher_logprobs": teacher[ids],
        "rollout_logprobs": rollout[ids],
        "mask": torch.ones(VOCABULARY, 1),
    }
    arguments: dict[str, Any] = {**inputs, **params}
    statistics = distillation_statistics(name, **arguments)
    loss, _ = compute_distillation_loss(name, **arguments, weights=rollout.exp().unsqueeze(1), statistics=statistics)
    return torch.autograd.grad(loss, student_logits)[0]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


@SOME
@given(seeds)
def test_the_adopted_estimator_has_the_gradient_of_reverse_kl(seed: int) -> None:
    student, teacher, _ = three_policies(seed)
    (exact,) = torch.autograd.grad(kl(student.log_softmax(-1), teacher), student)
    assert torch.allclose(expected_gradient("mc_recomputed", seed), exact, atol=1e-12)


@SOME
@given(seeds)
def test_stale_advantages_reward_leaving_the_policy_that_rolled_out(seed: int) -> None:
    student, teacher, rollout = three_policies(seed)
    current = student.log_softmax(-1)
    (exact,) = torch.autograd.grad(kl(current, teacher) - kl(current, rollout), student)
    assert torch.allclose(expected_gradient("mc_stale_advantage", seed), exact, atol=1e-12)


@SOME
@given(seeds)
def test_decoupling_and_an_ample_budget_change_nothing(seed: int) -> None:
    exact = expected_gradient("mc_recomputed", seed)
    assert torch.allclose(expected_gradient("mc_m2po", seed, budget=1e9), exact, atol=1e-12)
    assert torch.allclose(expected_gradient("mc_decoupled", seed, cap=1e9), exact, atol=1e-12)


@SOME
@given(seeds)
def test_full_caches_give_the_exact_kl_and_truncated_ones_a_bias(seed: int) -> None:
    student, teacher, rollout = three_policies(seed)
    current = student.log_softmax(-1)
    for name, exact in (
        ("forward_kl_teacher_topk", kl(teacher, current)),
        ("reverse_kl_student_topk", kl(current, teacher)),
    ):
        (gradient,) = torch.autograd.grad(exact, student, retain_graph=True)
        for k in (VOCABULARY, 2):
            ids = (teacher if "teacher" in name else rollout).topk(k).indices.view(1, 1, k)
            loss, metrics = compute_distillation_loss(
                name, student_logprobs=current[ids], teacher_logprobs=teacher[ids], mask=torch.ones(1, 1)
            )
            (cached,) = torch.autograd.grad(loss, student, retain_graph=True)
            assert torch.allclose(cached, gradient, atol=1e-12) == (k == VOCABULARY)
            assert (metrics["cached_mass"] < 1 - 1e-12) == (k < VOCABULARY)


def test_no_weight_on_the_student_cache_restores_what_it_left_out() -> None:
    """With two of five ids cached, no positive weights on them reproduce the sign of the full gradient."""
    student = torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-6.0, -6.0, 0.0, -6.0, -6.0], dtype=torch.float64).log_softmax(-1)
    current = student.log_softmax(-1)
    (full,) = torch.autograd.grad(kl(current, teacher), student, retain_graph=True)
    terms = [
        compute_distillation_loss(
            "reverse_kl_student_topk",
            student_logprobs=current[id].view(1, 1, 1),
            teacher_logprobs=teacher[id].view(1, 1, 1),
            mask=torch.ones(1, 1),
        )[0]
        for id in (0, 1)
    ]
    assert full[2] < 0 < full[3]  # toward the teacher's favorite, away from the others
    for a, b in itertools.product([0.1, 1.0, 10.0], repeat=2):
        (cached,) = torch.autograd.grad(a * terms[0] + b * terms[1], student, retain_graph=True)
        # The favorite, left out of the cache, is treated like every other token left out.
        assert cached.abs().sum() > 0 and torch.isclose(cached[2], cached[3])


def test_m2po_drops_the_largest_outward_moves_until_the_rest_fit_the_budget_and_ties_together() -> None:
    """Outward δ² are 1/16, 1/4, 1/4: one of the two equal ones would fit a mean of 0.16, both would not."""
    delta = torch.tensor([0.25, 0.5, -0.5, 0.5, -1.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)  # the last two move inward
    student = torch.full_like(delta, -2.0).view(1, 1, -1).requires_grad_()
    inputs: dict[str, Any] = {
        "student_logprobs": student,
        "teacher_logprobs": student.detach() + advantage,
        "rollout_logprobs": student.detach() - delta,
        "mask": torch.ones(1, 1),
    }
    for budget, kept in ((0.16, [1, 0, 0, 1, 1]), (0.19, [1, 1, 1, 1, 1]), (0.06, [0, 0, 0, 1, 1])):
        loss, metrics = compute_distillation_loss("mc_m2po", **inputs, budget=budget)
        (gradient,) = torch.autograd.grad(loss, student)
        expected = -delta.exp() * advantage * torch.tensor(kept) / len(kept)
        assert torch.allclose(gradient.flatten(), expected, atol=1e-12)
        assert metrics["kept_fraction"] == sum(kept) / len(kept)


def gradient_variance(seed: int, m: int) -> Tensor:
    """Total variance of the adopted estimator's gradient over all V^m caches, exactly."""
    student, teacher, rollout = three_policies(seed)
    caches = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=m)))
    probability = rollout[caches].sum(1).exp()
    live = student.detach().expand(len(caches), VOCABULARY).clone().requires_grad_()
    loss, _ = compute_distillation_loss(
        "mc_recomputed",
        student_logprobs=live.log_softmax(-1).gather(1, caches).unsqueeze(1),
        teacher_logprobs=teacher[caches].unsqueeze(1),
        rollout_logprobs=rollout[caches].unsqueeze(1),
        mask=torch.ones(len(caches), 1),
        weights=torch.ones(len(caches), 1).double(),
    )
    (gradients,) = torch.autograd.grad(loss, live)
    mean = probability @ gradients
    return (probability.unsqueeze(1) * (gradients - mean).square()).sum()


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_local_variance_falls_as_one_over_the_number_of_draws(seed: int) -> None:
    single = gradient_variance(seed, 1)
    for m in (2, 3):
        assert torch.isclose(gradient_variance(seed, m), single / m, rtol=1e-9, atol=1e-12)


@SOME
@given(seeds)
def test_a_top_k_kl_as_advantage_teaches_nothing_and_is_refused(seed: int) -> None:
    student, teacher, _ = three_policies(seed)
    current = student.log_softmax(-1)
    advantage = -kl(current, teacher).detach()
    policy_gradient_loss = -(current.detach().exp() * advantage * current).sum()
    (gradient,) = torch.autograd.grad(policy_gradient_loss, student)
    assert torch.allclose(gradient, torch.zeros_like(gradient), atol=1e-12)
    with pytest.raises(ValueError, match="zero expected gradient"):
        compute_distillation_loss(
            "topk_kl_advantage",
            student_logprobs=current.view(1, 1, -1),
            teacher_logprobs=teacher.view(1, 1, -1),
            mask=torch.ones(1, 1),
        )


def random_inputs(seed: int, batch: int = 4, length: int = 3, k: int = 4) -> dict[str, Any]:
    names = ("student_logprobs", "teacher_logprobs", "rollout_logprobs", "proximal_logprobs")
    raw = logits(seed, len(names), batch, length, k)
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    return {name: -raw[i].abs() for i, name in enumerate(names)} | {"mask": mask}


@SOME
@given(seeds, st.sampled_from(CACHED))
def test_masked_positions_may_hold_nan_and_get_no_gradient(seed: int, name: str) -> None:
    inputs = random_inputs(seed)
    mask = inputs["mask"].unsqueeze(-1)
    poisoned: dict[str, Any] = {
        key: x if key == "mask" else torch.where(mask, x, torch.nan) for key, x in inputs.items()
    }
    results = []
    for case in (inputs, poisoned):
        live: Tensor = case["student_logprobs"].clone().requires_grad_()
        case["student_logprobs"] = live
        loss, metrics = compute_distillation_loss(name, **case)
        assert all(torch.isfinite(value) for value in metrics.values())
        results.append((loss.detach(), torch.autograd.grad(loss, live)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~inputs["mask"]] == 0).all()


@SOME
@given(seeds, st.sampled_from(CACHED))
def test_micro_batches_add_up(seed: int, name: str) -> None:
    inputs = random_inputs(seed)
    weights = inputs["mask"].double() / inputs["mask"].sum().clamp(min=1)
    whole, _ = compute_distillation_loss(name, **inputs)
    statistics = distillation_statistics(name, **inputs)
    parts = []
    for row in range(len(weights)):
        rows = {key: x[row : row + 1] for key, x in inputs.items()}
        loss, _ = compute_distillation_loss(name, **rows, weights=weights[row : row + 1], statistics=statistics)
        parts.append(loss)
    assert torch.isclose(torch.stack(parts).sum(), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CACHED)
def test_non_finite_scores_at_sampled_tokens_are_refused_by_sample(name: str) -> None:
    inputs = random_inputs(3)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    inputs["teacher_logprobs"][2, 1, 3] = -torch.inf
    with pytest.raises(ValueError, match=rf"{name}: teacher_logprobs of sample 2 is -inf at position 1, 3"):
        compute_distillation_loss(name, **inputs)


@pytest.mark.parametrize("name", CACHED)
def test_a_mask_that_holds_weights_is_refused(name: str) -> None:
    inputs = random_inputs(3)
    inputs["mask"] = torch.where(inputs["mask"], 0.3, 0.0)
    for compute in (compute_distillation_loss, distillation_statistics):
        with pytest.raises(ValueError, match=rf"{name}: mask holds 0.3"):
            compute(name, **inputs)


def test_missing_rollout_and_misspelt_names_are_named() -> None:
    inputs = random_inputs(1)
    del inputs["rollout_logprobs"]
    with pytest.raises(ValueError, match="mc_recomputed needs rollout_logprobs"):
        compute_distillation_loss("mc_recomputed", **inputs)
    with pytest.raises(ValueError, match="did you mean 'mc_recomputed'"):
        compute_distillation_loss("mc_recomputd", **inputs)
    with pytest.raises(ValueError, match="mc_clipped has no parameter 'clp'; did you mean 'clip'"):
        compute_distillation_loss("mc_clipped", **inputs, clp=(0.2, 0.2))


def test_a_micro_batch_does_not_forget_the_statistics_of_the_whole_batch() -> None:
    inputs = random_inputs(1)
    with pytest.raises(ValueError, match="mc_m2po needs statistics of the whole batch"):
        compute_distillation_loss("mc_m2po", **inputs, weights=inputs["mask"].double())


@SOME
@given(seeds)
def test_each_draw_gets_the_gradient_its_formula_says(seed: int) -> None:
    inputs = random_inputs(seed)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    student, teacher, rollout, proximal = (
        inputs[f"{who}_logprobs"] for who in ("student", "teacher", "rollout", "proximal")
    )
    ratio, advantage = (student - rollout).exp(), teacher - student
    clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    weight = (proximal - rollout).exp()
    expected = {
        "forward_kl_teacher_topk": -teacher.exp() * student.shape[-1],
        "reverse_kl_student_topk": student.exp() * (1 - advantage) * student.shape[-1],
        "mc_recomputed": -ratio * advantage,
        "mc_stale_advantage": -ratio * (teacher - rollout),
        "mc_clipped": torch.where(clipped, 0.0, -ratio * advantage),
        "mc_no_ratio": -advantage,
        "mc_decoupled": torch.where(weight > 5.0, 0.0, -ratio * advantage),
    }
    for name, gradient in expected.items():
        inputs["student_logprobs"] = live = student.clone().requires_grad_()
        loss, _ = compute_distillation_loss(name, **inputs)
        (actual,) = torch.autograd.grad(loss, live)
        assert torch.allclose(actual, gradient / student.numel(), rtol=1e-9, atol=1e-12), name
