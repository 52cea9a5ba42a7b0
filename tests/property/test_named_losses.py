"""What single methods promise: SAT's common radius, ASymPO's balance, M2PO's budget, and who stops what."""

import math
from dataclasses import replace
from typing import Any

import torch
from algorithm_batches import Tensors, batches, center, make_batch, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.algorithms import compute_loss, token_weights, uncentered_groups
from headway.algorithms.clipped import inverse_cdf

SOME = settings(max_examples=50, deadline=None)


def gate_root(q: float, eps: float, up: bool) -> float:
    """Where |r − 1| meets ε/(1 + (d/q)²), by bisection; the difference grows with d."""
    low, high = 0.0, 10.0
    for _ in range(200):
        d = (low + high) / 2
        reach = math.expm1(d) if up else -math.expm1(-d)
        low, high = (low, d) if reach > eps / (1 + (d / q) ** 2) else (d, high)
    return low


@SOME
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.1, 0.3, 0.6, 0.9]),
    st.floats(0.02, 0.4),
    st.floats(0.02, 0.4),
)
def test_sat_has_the_gradient_of_a_ppo_clip_with_one_smaller_radius(
    seed: int, quantile: float, eps_low: float, eps_high: float
) -> None:
    batch = make_batch(seed, spread=0.3)
    assume(batch.mask.any())
    d = (batch.logprobs - batch.behavior_logprobs).abs()
    q = float(inverse_cdf(d, batch.mask, quantile))
    assume(q > 0)
    # A token exactly at q is not gated; a hair's breadth keeps rounding from deciding for it.
    up = min(math.log1p(eps_high), max(q, gate_root(q, eps_high, up=True))) + 1e-12
    down = min(-math.log1p(-eps_low), max(q, gate_root(q, eps_low, up=False))) + 1e-12
    _, gradient, metrics = run("sat", batch, quantile=quantile, eps_low=eps_low, eps_high=eps_high)
    _, expected, _ = run("ppo", batch, eps_low=-math.expm1(-down), eps_high=math.expm1(up))
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)
    assert metrics["quantile_value"] == q


@SOME
@given(batches, st.floats(0.01, 1.0))
def test_the_quantile_is_the_smallest_value_that_covers_its_share(batch: Tensors, quantile: float) -> None:
    assume(batch.mask.any())
    values = batch.logprobs.abs()
    active = values[batch.mask]
    q = inverse_cdf(values, batch.mask, quantile)
    assert (active <= q).double().mean() >= quantile - 1e-9
    below = active[active < q]
    assert len(below) == 0 or (active <= below.max()).double().mean() < quantile


@SOME
@given(batches)
def test_asympo_is_zero_forward_in_every_group_and_has_the_gradient_of_log_s(batch: Tensors) -> None:
    loss, gradient, metrics = run("asympo", batch)
    assert abs(loss) < 1e-12
    live = batch.logprobs.clone().requires_grad_()
    group_terms = []
    for g in batch.group.unique():
        members = [b for b in range(len(batch.group)) if batch.group[b] == g and batch.mask[b].any()]
        if members:
            terms = [batch.advantages[b, 0] * (-live[b][batch.mask[b]].mean()).log() for b in members]
            group_terms.append(torch.stack(terms).mean())
    if not group_terms:
        return
    twin = torch.stack(group_terms).mean()
    (expected,) = torch.autograd.grad(twin, live)
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(metrics["log_scale_objective"], twin.detach(), rtol=1e-9, atol=1e-12)


@SOME
@given(st.integers(0, 2**31), st.sampled_from(["asympo", "spo", "naive"]))
def test_methods_of_the_current_policy_never_look_at_behavior_data(seed: int, name: str) -> None:
    batch = make_batch(seed)
    loss, gradient, _ = run(name, batch)
    alone, alone_gradient, _ = run(name, batch, behavior_logprobs=None, behavior_entropy=None, proximal_logprobs=None)
    nan = torch.full_like(batch.logprobs, torch.nan)
    poisoned, _, _ = run(name, batch, behavior_logprobs=nan, behavior_entropy=nan, proximal_logprobs=nan)
    assert torch.equal(loss, alone)
    assert torch.equal(loss, poisoned)
    assert torch.equal(gradient, alone_gradient)


def test_the_stabilizer_stops_tokens_past_their_bound_and_keeps_them_in_the_mean() -> None:
    probabilities = torch.tensor([[0.999, 0.5], [0.001, 0.5]], dtype=torch.float64)
    batch = replace(
        make_batch(0, num_responses=2, length=2),
        logprobs=probabilities.log(),
        mask=torch.ones(2, 2),
        advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.long),
    )
    _, gradient, metrics = run("asympo", batch, p_low=0.05, p_high=0.95)
    assert gradient[0, 0] == 0
    assert gradient[1, 0] == 0
    scale = -(math.log(0.95) + math.log(0.5)) / 2
    assert torch.allclose(gradient[0, 1], torch.tensor(-1 / (2 * 2 * scale), dtype=torch.float64))
    assert metrics["at_high_fraction"] == metrics["at_low_fraction"] == 0.25


def test_a_group_that_lost_a_member_is_found_and_centering_again_mends_it() -> None:
    batch = make_batch(4, num_responses=6)
    mask = torch.ones_like(batch.mask)
    group = torch.tensor([3, 3, 3, 8, 8, 8])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    advantages = center(rewards, mask, group).unsqueeze(1).expand_as(mask)
    assert uncentered_groups(advantages, mask, group).tolist() == []
    mask[4] = False
    assert uncentered_groups(advantages, mask, group).tolist() == [8]
    mended = center(rewards, mask, group).unsqueeze(1).expand_as(mask)
    assert uncentered_groups(mended, mask, group).tolist() == []


@SOME
@given(batches, st.sampled_from([0.0, 1e-4, 0.01, 0.04]))
def test_m2po_keeps_as_many_outward_tokens_as_the_budget_allows(batch: Tensors, budget: float) -> None:
    # Ties must fall together, so some values are made equal.
    delta = (batch.logprobs - batch.behavior_logprobs).mul(20).round().div(20)
    batch = replace(batch, behavior_logprobs=torch.zeros_like(delta), logprobs=delta)
    _, gradient, _ = run("m2po", batch, budget=budget)
    square = delta.square()
    outward = batch.mask & (batch.advantages * delta > 0)
    dropped = outward & (gradient == 0)
    kept = outward & ~dropped
    assert not kept.any() or square[kept].mean() <= budget + 1e-12
    if dropped.any():
        least = square[dropped].min()
        assert not kept.any() or square[kept].max() < least
        assert square[kept | (outward & (square == least))].mean() > budget - 1e-12


@SOME
@given(batches)
def test_stopped_quadrants_are_exactly_the_tokens_without_gradient(batch: Tensors) -> None:
    for name in ("ppo", "estr", "sat", "kpop", "dppo_tv", "m2po", "decoupled_masked", "icepop"):
        _, gradient, metrics = run(name, batch)
        stopped = batch.mask & (gradient == 0) & (batch.advantages != 0)
        delta = batch.logprobs - batch.behavior_logprobs
        count = batch.mask.sum().clamp(min=1)
        up, down = batch.advantages > 0, batch.advantages < 0
        assert torch.isclose(metrics["stopped_positive_up"], (stopped & up & (delta > 0)).sum().double() / count)
        assert torch.isclose(metrics["stopped_negative_down"], (stopped & down & (delta < 0)).sum().double() / count)


@SOME
@given(batches, st.floats(0.0, 1.0))
def test_per_token_advantages_weigh_only_their_own_token_in_gspo(batch: Tensors, credit: float) -> None:
    advantages = batch.advantages.clone()
    advantages[:, 0] = credit
    weights = token_weights("seq_mean_token_mean", batch.mask, dtype=torch.float64)
    _, gradient, _ = run("gspo", replace(batch, advantages=advantages), eps_low=1e9, eps_high=1e9)
    delta = torch.where(batch.mask, batch.logprobs - batch.behavior_logprobs, 0.0)
    ratio = (delta.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)).exp()
    assert torch.allclose(gradient, -ratio * advantages * weights, rtol=1e-9, atol=1e-12)


def test_estr_masks_confident_tokens_first() -> None:
    batch = replace(
        make_batch(0, num_responses=1, length=2),
        logprobs=torch.tensor([[-1.0, -1.0]]),
        behavior_logprobs=torch.tensor([[-0.9, -0.9]]),
        behavior_entropy=torch.tensor([[0.0, 2.0]]),
        advantages=torch.ones(1, 2),
        mask=torch.ones(1, 2),
        group=torch.zeros(1, dtype=torch.long),
    )
    _, gradient, metrics = run("estr", batch, tau=0.5)
    assert gradient[0, 0] == 0
    assert gradient[0, 1] != 0
    assert metrics["masked_fraction"] == metrics["masked_positive_down"] == 0.5


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    logprobs = torch.zeros(1, 1, requires_grad=True)
    args: dict[str, Any] = {
        "behavior_logprobs": torch.full((1, 1), -3.0),
        "advantages": -torch.ones(1, 1),
        "mask": torch.ones(1, 1),
    }
    loss, _ = compute_loss("ppo", logprobs=logprobs, dual_clip=3.0, **args)
    assert loss == 3.0
    assert torch.autograd.grad(loss, logprobs)[0] == 0
