"""The bound on the entropy from the most likely tokens: never above the truth, and never beaten."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms import entropy_error_metrics, topk_entropy_lower_bound
from headway.training.entropy import entropy_bounds
from headway.types import Response, SideData

SOME = settings(max_examples=100, deadline=None)
seeds = st.integers(0, 2**31)
sharpness = st.sampled_from([0.0, 0.3, 1.0, 3.0, 10.0, 50.0])


def distribution(seed: int, size: int, sharp: float) -> Tensor:
    """A random categorical over `size` tokens, log-probs in float64; the sharper, the surer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(sharp * torch.randn(size, generator=generator, dtype=torch.float64), 0)


def entropy(logprobs: Tensor) -> float:
    return float(torch.special.entr(logprobs.exp()).sum())


def bound(logprobs: Tensor, k: int, sampled: int) -> float:
    top = logprobs.topk(k)
    return float(topk_entropy_lower_bound(top.values, logprobs[sampled], (top.indices == sampled).any()))


@SOME
@given(seeds, st.integers(1, 40), sharpness, st.data())
def test_the_bound_is_never_above_the_entropy_and_only_rises_with_k(seed: int, size: int, sharp: float, data):
    logprobs = distribution(seed, size, sharp)
    sampled = data.draw(st.integers(0, size - 1))
    bounds = [bound(logprobs, k, sampled) for k in range(1, size + 1)]
    assert min(bounds) >= 0 and max(bounds) <= entropy(logprobs) + 1e-9
    assert bounds == pytest.approx(sorted(bounds), abs=1e-9)
    assert bounds[-1] == pytest.approx(entropy(logprobs), abs=1e-9)


@SOME
@given(seeds, st.integers(2, 40), sharpness, st.data())
def test_some_distribution_with_the_same_reported_numbers_has_exactly_this_entropy(seed, size, sharp, data):
    logprobs = distribution(seed, size, sharp)
    k = data.draw(st.integers(1, size))
    sampled = data.draw(st.integers(0, size - 1))
    top = logprobs.topk(k)
    known = top.values.exp().tolist()
    if sampled not in top.indices.tolist():
        known.append(float(logprobs[sampled].exp()))
    smallest, rest = float(top.values[-1].exp()), 1 - math.fsum(known)
    extremal = list(known)
    while rest > 1e-12:
        extremal.append(min(rest, smallest))
        rest -= smallest
    # It is a distribution over no more tokens than the true one, with the same most likely tokens.
    assert len(extremal) <= size + 1  # + 1: a last crumb of rounding
    assert sorted(extremal, reverse=True)[:k] == pytest.approx(sorted(known, reverse=True)[:k])
    assert bound(logprobs, k, sampled) == pytest.approx(
        entropy(torch.tensor(extremal, dtype=torch.float64).log()), abs=1e-7
    )


@SOME
@given(seeds, st.integers(2, 40), sharpness, st.data())
def test_it_is_at_least_the_simple_bound_which_gives_every_token_left_the_kth_probability(seed, size, sharp, data):
    logprobs = distribution(seed, size, sharp)
    k = data.draw(st.integers(1, size))
    top = logprobs.topk(k).values
    rest = max(0.0, 1 - float(top.exp().sum()))
    simple = entropy(top) - rest * float(top[-1])
    assert bound(logprobs, k, int(logprobs.argmax())) >= simple - 1e-9


@SOME
@given(seeds, st.integers(2, 40), sharpness, st.data())
def test_rounding_of_reported_log_probs_to_float32_moves_it_by_little(seed, size, sharp, data):
    logprobs = distribution(seed, size, sharp)
    k = data.draw(st.integers(1, size))
    top = logprobs.float().topk(k).values
    found = float(topk_entropy_lower_bound(top, top[0], torch.tensor(True)))
    assert found <= entropy(logprobs) + 5e-5


def test_tokens_outside_a_truncated_support_add_nothing():
    half = math.log(0.5)
    top = torch.tensor([half, half, -torch.inf, -torch.inf])
    assert float(topk_entropy_lower_bound(top, torch.tensor(half), torch.tensor(True))) == pytest.approx(math.log(2))


def test_a_sampled_token_outside_the_top_counts_by_its_own_probability():
    # 0.6 + 0.1 known, 0.3 left in tokens of at most 0.6: one token of 0.3 at the least.
    found = topk_entropy_lower_bound(torch.tensor([math.log(0.6)]), torch.tensor(math.log(0.1)), torch.tensor(False))
    assert float(found) == pytest.approx(-sum(p * math.log(p) for p in (0.6, 0.1, 0.3)))


def response(length: int, *, top: bool = True) -> Response:
    logprobs = np.full(length, math.log(0.25), np.float32)
    side = SideData(
        top_ids=np.zeros((length, 2), np.int32) + np.arange(2, dtype=np.int32),
        top_logprobs=np.full((length, 2), math.log(0.25), np.float32),
    )
    return Response(
        token_ids=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.bool_),
        versions=np.zeros(length, np.int32),
        reward=0.0,
        behavior_logprobs=logprobs,
        side=side if top else SideData(),
    )


def test_bounds_of_many_responses_are_those_of_each_and_none_where_nothing_was_reported():
    bounds = entropy_bounds([response(3), response(0), response(5, top=False), response(1)])
    assert [None if b is None else len(b) for b in bounds] == [3, 0, None, 1]
    assert bounds[0] is not None and bounds[0].dtype == np.float32
    assert bounds[0].tolist() == pytest.approx([math.log(4)] * 3)
    assert entropy_bounds([response(2, top=False)]) == [None]


def test_the_error_is_taken_over_sampled_tokens_alone():
    used, exact = torch.tensor([[1.0, 2.0, torch.nan]]), torch.tensor([[1.5, 1.75, 0.0]])
    metrics = entropy_error_metrics(used, exact, torch.tensor([[1, 1, 0]]))
    assert {name: float(value) for name, value in metrics.items()} == {
        "behavior_entropy_error_mean": 0.375,
        "behavior_entropy_error_max": 0.5,
        "behavior_entropy_error_bias": -0.125,
    }
