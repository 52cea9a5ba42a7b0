"""ESTR with an approximate behavior entropy: the approximation is used, measured, and independent of the split."""

from dataclasses import replace

import numpy as np
import pytest
from test_learner import assert_same, batch, learner, parameters_after

from headway.types import Batch, Response, SideData

SOURCES = ("topk_lower_bound", "learner")
K = 4


def with_top(response: Response, seed: int) -> Response:
    """The response with made-up top-k log-probs that hold 0.9 of the mass."""
    rng = np.random.default_rng(seed)
    length = len(response.token_ids)
    shares = np.sort(rng.dirichlet(np.ones(K), length), axis=1)[:, ::-1] * 0.9
    ids = rng.permuted(np.tile(np.arange(20), (length, 1)), axis=1)[:, :K]
    side = SideData(top_ids=ids.astype(np.int32), top_logprobs=np.log(shares).astype(np.float32))
    return replace(response, side=side)


def reported(seed: int, *, entropy: bool = True) -> Batch:
    """`batch(seed)` as an engine reports it, with or without its exact entropy."""
    plain = batch(seed)
    groups = [
        replace(g, responses=tuple(with_top(r, seed) for r in g.responses))
        if entropy
        else replace(g, responses=tuple(replace(with_top(r, seed), behavior_entropy=None) for r in g.responses))
        for g in plain.groups
    ]
    return replace(plain, groups=tuple(groups))


@pytest.mark.parametrize("source", SOURCES)
def test_the_split_does_not_change_the_step(source: str):
    whole = learner("estr", behavior_entropy=source, tau=0.05)
    split = learner("estr", behavior_entropy=source, micro_batch_tokens=12, tau=0.05)
    assert_same(parameters_after(whole, reported(1)), parameters_after(split, reported(1)))


@pytest.mark.parametrize("source", SOURCES)
def test_an_engine_without_entropies_trains_the_same_and_only_the_error_is_unknown(source: str):
    told, untold = (learner("estr", behavior_entropy=source, tau=0.05) for _ in range(2))
    with_error = told.train(reported(2)).metrics
    without = untold.train(reported(2, entropy=False)).metrics
    assert with_error["behavior_entropy_error_max"] >= with_error["behavior_entropy_error_mean"] > 0
    assert not any("error" in name for name in without)
    assert with_error["masked_fraction"] == without["masked_fraction"] > 0
    assert_same(dict(told.weights()), dict(untold.weights()))


def test_exact_entropies_are_the_default_and_have_no_error_to_log():
    assert not any("error" in name for name in learner("estr").train(reported(3)).metrics)


def test_a_batch_without_entropies_is_refused_with_the_mend():
    with pytest.raises(ValueError, match='set behavior_entropy = "topk_lower_bound" or "learner"'):
        learner("estr").train(reported(4, entropy=False))
