"""VCPO's learning-rate scale, and what a method of whole groups does with a group that is not whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import assert_same, batch, learner, parameters_after

from headway.config import ConfigError, parse_config
from headway.runtime.checks import check_algorithm
from headway.training.groups import PartialGroup
from headway.types import Batch, Response


def with_responses(given: Batch, change) -> Batch:
    """Every response put through `change(group index, member, response)`; None takes it out."""
    groups = []
    for index, group in enumerate(given.groups):
        changed = [change(index, member, r) for member, r in enumerate(group.responses)]
        groups.append(replace(group, responses=tuple(r for r in changed if r is not None)))
    return replace(given, groups=tuple(groups))


def masked_to_nothing(response: Response) -> Response:
    nothing = np.zeros(len(response.mask), np.bool_)
    return replace(response, mask=nothing, versions=np.full(len(nothing), -1, np.int32))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), max_tokens=st.integers(1, 60))
def test_the_scale_is_that_of_the_whole_batch_whatever_the_split(seed: int, max_tokens: int):
    given_batch = batch(seed)
    one = learner("grpo", micro_batch_tokens=max_tokens, vcpo_lr_scale=True)
    rows, logprobs, _ = one.score(given_batch)
    assert rows.behavior_logprobs is not None
    delta = torch.where(rows.mask, logprobs - rows.behavior_logprobs, 0.0).sum(1)
    weights = delta.exp().clamp(max=8.0)
    ess = float(weights.sum() ** 2 / weights.square().sum())
    metrics = one.train(given_batch).metrics
    assert metrics["ess"] == pytest.approx(ess, rel=1e-6)
    assert metrics["lr_scale"] == pytest.approx(math.sqrt(min(1.0, ess / 12)), rel=1e-6)
    assert metrics["learning_rate"] == pytest.approx(1e-2 * metrics["lr_scale"])


def test_a_batch_from_the_policy_itself_takes_the_whole_rate_and_the_very_same_step():
    scaled, plain = learner("grpo", vcpo_lr_scale=True), learner("grpo")
    _, logprobs, _ = plain.score(batch(1))
    starts = [len(group.prompt.token_ids) for group in batch(1).groups for _ in group.responses]

    def fresh(index: int, member: int, response: Response) -> Response:
        row = index * 4 + member
        own = logprobs[row, starts[row] : starts[row] + len(response.mask)]
        return replace(response, behavior_logprobs=own.numpy())

    on_policy = with_responses(batch(1), fresh)
    scale = scaled.train(on_policy).metrics["lr_scale"]
    assert scale == pytest.approx(1.0, abs=1e-6)
    plain.train(on_policy)
    assert_same(dict(scaled.weights()), dict(plain.weights()))


def test_a_batch_with_nothing_to_train_on_moves_nothing_under_the_scale():
    one = learner("grpo", vcpo_lr_scale=True)
    one.train(batch(1))
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    empty = with_responses(replace(batch(2, step=1)), lambda g, m, r: masked_to_nothing(r))
    assert one.train(empty).metrics["lr_scale"] == 0
    assert_same(before, dict(one.weights()))


def test_the_scale_without_log_probs_of_the_engine_is_refused_at_the_start_and_in_the_learner():
    config = parse_config({"algorithm": "spo", "engines": {"logprobs": False}, "optimizer": {"vcpo_lr_scale": True}})
    with pytest.raises(ConfigError, match=r"set that to true, or optimizer\.vcpo_lr_scale to false"):
        check_algorithm(config)
    untold = with_responses(batch(1), lambda g, m, r: replace(r, behavior_logprobs=None))
    with pytest.raises(ValueError, match=r"set engines\.logprobs = true"):
        learner("spo", vcpo_lr_scale=True).train(untold)


@pytest.mark.parametrize("algorithm", ["asympo", "spo", "naive"])
def test_a_group_whose_member_lost_all_tokens_is_refused_by_name(algorithm: str):
    rewards = iter(range(12))
    uneven = with_responses(
        batch(1), lambda g, m, r: replace(masked_to_nothing(r) if (g, m) == (1, 2) else r, reward=float(next(rewards)))
    )
    one = learner(algorithm)
    with pytest.raises(PartialGroup, match=r"group 1: members \[2\] have no token left"):
        one.train(uneven)
    assert one.policy_version == 0
    learner("grpo").train(uneven)  # its loss holds token by token


def test_a_lost_member_at_the_mean_leaves_the_zero_sum_alone():
    rewards = [0.0, 1.0, 0.5, 0.5]
    even = with_responses(
        batch(1), lambda g, m, r: replace(masked_to_nothing(r) if (g, m) == (1, 2) else r, reward=rewards[m])
    )
    assert learner("asympo").train(even).metrics["step_skipped"] == 0


def test_a_group_without_one_of_its_members_is_centered_again_over_the_others():
    smaller = with_responses(batch(1), lambda g, m, r: None if (g, m) == (0, 3) else r)
    whole = parameters_after(learner("asympo"), smaller)
    split = parameters_after(learner("asympo", micro_batch_tokens=12), smaller)
    assert_same(whole, split)
    # Each group's value is 0 only when its advantages sum to 0.
    assert learner("asympo").train(smaller).metrics["loss"] == pytest.approx(0, abs=1e-6)
