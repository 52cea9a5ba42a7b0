"""Gradients by group are the learner's gradient, and what is said of their noise holds where the truth is known."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import METHODS, batch, learner
from torch import Tensor

from headway.algorithms import ALGORITHMS, find_algorithm, token_weights
from headway.training.batching import Rows, collate, micro_batches
from headway.training.gradient_noise import (
    bootstrap_cosine,
    cosine_floor,
    jackknife_error,
    left_out_cosines,
    random_half,
    relative_variance,
    spearman_brown,
)
from headway.training.gradients import (
    GroupGradients,
    Projection,
    gradient_cosine,
    group_gradients,
    plain_coefficients,
    token_loss,
    weight_metrics,
)
from headway.training.scoring import score_rows


@pytest.mark.parametrize("algorithm", METHODS)
def test_groups_add_up_to_the_gradient_the_learner_steps_with(algorithm: str):
    """Two groups to a micro-batch, so that a method's scope of a micro-batch is not the whole batch."""
    trained = learner(algorithm, micro_batch_tokens=40)
    one = learner(algorithm, micro_batch_tokens=40)
    rows = collate(batch(5), pad_id=0)
    rows = replace(rows, rewards=rows.rewards + torch.arange(12) * 0.01)  # no group teaches nothing

    def score(some: Rows) -> Tensor:
        return score_rows(one.model, some, temperature=1.0, autocast=torch.float32)[0]

    parts = micro_batches(rows.lengths, max_tokens=40)
    assert len(parts) > 1
    with torch.no_grad():
        logprobs = score(rows)
    found = token_loss(algorithm, rows, logprobs, params={}, parts=parts)
    parameters = list(one.model.parameters())
    gradients = group_gradients(
        score, parameters, rows, found.coefficients, projection=Projection(parameters, dims=101), max_tokens=40
    )
    weights = token_weights(find_algorithm(algorithm).reduction, rows.mask, rows.group)
    trained._passes.backward(rows, {"advantages": found.advantages, "weights": weights})
    for expected, tensor in zip(trained.model.parameters(), gradients.total, strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(tensor, expected.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(Projection(parameters, dims=101)(gradients.total), gradients.projected.sum(0))


@pytest.mark.parametrize("algorithm", [n for n in METHODS if n not in ("spo", "asympo")])
def test_on_policy_every_token_weighs_what_the_plain_policy_gradient_says(algorithm: str):
    rows = collate(batch(2), pad_id=0)
    assert rows.behavior_logprobs is not None
    logprobs = rows.behavior_logprobs.clone()
    found = token_loss(algorithm, rows, logprobs, params={}, parts=[torch.arange(12)])
    row = ALGORITHMS[algorithm]
    plain = plain_coefficients(row.advantage, row.reduction, rows)
    torch.testing.assert_close(found.coefficients, plain, rtol=1e-4, atol=1e-6)
    weights = weight_metrics(found, plain, rows, logprobs)
    assert weights["stopped_fraction"] == 0
    assert weights["mean_weight"] == pytest.approx(1, abs=1e-4)
    assert weights["weight_ess"] == pytest.approx(1, abs=1e-4)


def test_stopped_tokens_are_counted_in_their_quadrant():
    rows = collate(batch(2), pad_id=0)
    assert rows.behavior_logprobs is not None
    logprobs = torch.where(rows.mask, rows.behavior_logprobs + 1.0, 0.0)  # r = e everywhere: PPO stops A > 0 only
    found = token_loss("ppo", rows, logprobs, params={}, parts=[torch.arange(12)])
    weights = weight_metrics(found, plain_coefficients("grpo", "token_mean", rows), rows, logprobs)
    positive = float((rows.mask & (found.advantages > 0).unsqueeze(1)).sum() / rows.mask.sum())
    assert weights["stopped_positive_up"] == pytest.approx(positive)
    assert weights["stopped_fraction"] == pytest.approx(positive)


# A bandit: one token an answer, logits θ, reward 1 for answer 0. The true gradient is known in closed form.
LOGITS = torch.tensor([0.5, 0.2, -0.3, 0.1, 0.0, -0.6])
GROUP_SIZE = 8


def bandit(num_groups: int, seed: int) -> tuple[GroupGradients, Tensor]:
    """Gradients of fresh groups at r = 1 with centered advantages, and the true direction −∇E[R]."""
    generator = torch.Generator().manual_seed(seed)
    size = num_groups * GROUP_SIZE
    answers = torch.multinomial(LOGITS.softmax(0), size, replacement=True, generator=generator)
    ones = torch.ones(size, 1)
    rows = Rows(
        input_ids=answers.unsqueeze(1),
        lengths=torch.ones(size, dtype=torch.int64),
        mask=ones.bool(),
        versions=torch.zeros(size, 1, dtype=torch.int32),
        rewards=(answers == 0).float(),
        group=torch.arange(num_groups).repeat_interleave(GROUP_SIZE),
        behavior_logprobs=None,
        behavior_entropy=None,
    )
    theta = LOGITS.clone().requires_grad_()
    gradients = group_gradients(
        lambda some: theta.log_softmax(0)[some.input_ids],
        [theta],
        rows,
        plain_coefficients("centered", "token_mean", rows),
        projection=Projection([theta], dims=6),
        max_tokens=64,
    )
    p = LOGITS.softmax(0)
    truth = -p[0] * ((torch.arange(6) == 0).float() - p)
    return gradients, truth


def test_the_reference_finds_the_true_gradient_of_a_bandit():
    gradients, truth = bandit(400, seed=0)
    exact = GroupGradients([truth], torch.zeros(1, 6), torch.zeros(1))
    assert gradient_cosine(gradients.total, exact.total) > 0.99


def test_the_noise_floor_predicts_what_fresh_batches_score_against_the_truth():
    """80 fresh batches of 3 groups: the floor, which never sees the truth, against the cosines with it."""
    num_rounds, size = 80, 3
    gradients, truth = bandit(num_rounds * size, seed=1)
    vectors = torch.stack([g.flatten() for g in gradients.projected])
    signed = Projection([truth], dims=6)([truth])
    rounds = torch.arange(num_rounds * size) // size
    floor = cosine_floor(vectors, torch.arange(num_rounds * size), rounds)
    batches = torch.stack([vectors[rounds == k].sum(0) for k in range(num_rounds)])
    with_truth = torch.cosine_similarity(batches, signed.expand_as(batches)).mean()
    assert floor.batch_truth == pytest.approx(float(with_truth), abs=0.06)
    assert floor.reference_truth > 0.98
    # The reference is nearly the truth, so a fresh batch scores the same against either.
    assert floor.fresh == pytest.approx(float(with_truth), abs=0.06)


def test_the_jackknife_error_covers_the_spread_over_repeated_data_and_not_much_more():
    """As in use: equal signal and noise in the batch, four times the data in the reference."""
    generator = torch.Generator().manual_seed(0)
    cosines, errors = [], []
    for _ in range(100):
        one, two = (torch.randn(32, 200, generator=generator) * spread for spread in (0.4, 0.2))
        one[:, 0] += 1
        two[:, 0] += 1
        cosines.append(torch.cosine_similarity(one.sum(0), two.sum(0), dim=0))
        errors.append(jackknife_error(left_out_cosines(one, two)))
    assert 0.9 < sum(errors) / 100 / float(torch.stack(cosines).std()) < 1.5


@pytest.mark.parametrize("alone", [1, 3])
def test_one_prompt_alone_has_no_error_and_one_group_no_variance(alone: int):
    """Also where others are there but move nothing, in the batch or in the reference."""
    batch, reference = torch.zeros(alone, 5), torch.ones(alone, 5)
    batch[0] = 1
    assert jackknife_error(left_out_cosines(batch, reference)) is None
    assert jackknife_error(left_out_cosines(reference, batch)) is None
    assert relative_variance(torch.ones(1), 1.0) is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cosine=st.floats(-1, 1))
def test_projection_keeps_inner_products_within_its_stated_error(seed: int, cosine: float):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 128), (128,), (300, 16)]
    one = [torch.randn(s, generator=generator) for s in shapes]
    other = [torch.randn(s, generator=generator) for s in shapes]
    two = [cosine * a + (1 - cosine**2) ** 0.5 * b for a, b in zip(one, other, strict=True)]
    project = Projection(one, dims=1021, seed=seed)
    p, q = project(one), project(two)
    exact = sum(float((a * b).sum()) for a, b in zip(one, two, strict=True))
    scale = float(torch.nn.utils.get_total_norm(one) * torch.nn.utils.get_total_norm(two))
    assert abs(float(p @ q) - exact) < 5 * scale * (2 / 1021) ** 0.5


@settings(max_examples=50, deadline=None)
@given(units=st.lists(st.integers(0, 5), min_size=2, max_size=40), seed=st.integers(0, 1000))
def test_a_random_half_holds_half_of_everything_and_of_every_even_unit(units: list[int], seed: int):
    labels = torch.tensor(units)
    half = random_half(labels, torch.Generator().manual_seed(seed))
    assert half.sum() == (len(units) + 1) // 2
    for unit in set(units):
        members = labels == unit
        assert abs(2 * int((half & members).sum()) - int(members.sum())) <= 1


@given(reliability=st.floats(0, 1), factor=st.floats(0.1, 20))
def test_more_data_and_back_is_the_same_reliability(reliability: float, factor: float):
    more = spearman_brown(reliability, factor)
    assert 0 <= more <= 1 + 1e-12
    assert spearman_brown(more, 1 / factor) == pytest.approx(reliability, abs=1e-9)


def test_relative_variance_is_zero_without_noise_and_one_with_nothing_else():
    same = torch.ones(32, 500)
    noise = torch.randn(32, 500, generator=torch.Generator().manual_seed(0))
    for groups, expected in ((same, 0.0), (noise, 1.0)):
        found = relative_variance(groups.square().sum(1), float(groups.sum(0).norm()))
        assert found == pytest.approx(expected, abs=0.1)


def test_the_bootstrap_is_that_of_resampled_vectors_and_lies_under_the_cosine():
    generator = torch.Generator().manual_seed(1)
    signal = torch.randn(50, generator=generator)
    batch, reference = (signal + 4 * torch.randn(32, 50, generator=generator) for _ in range(2))
    found = bootstrap_cosine(batch, reference, num_resamples=300, seed=7)
    assert found is not None
    drawn = torch.randint(32, (300, 32), generator=torch.Generator().manual_seed(7))
    plain = torch.stack([torch.cosine_similarity(batch[d].sum(0), reference[d].sum(0), dim=0) for d in drawn])
    assert found.mean == pytest.approx(float(plain.mean()), abs=1e-5)
    assert found.sd == pytest.approx(float(plain.std()), abs=1e-5)
    assert found.low < found.mean < found.high
    assert found.mean < float(torch.cosine_similarity(batch.sum(0), reference.sum(0), dim=0))


def test_one_prompt_has_no_bootstrap():
    assert bootstrap_cosine(torch.ones(1, 5), torch.ones(1, 5)) is None
    assert bootstrap_cosine(torch.eye(3), torch.zeros(3, 3)) is None
