import pytest

from headway.rollout import prompt_index, sample_seed


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own():
    visits = [prompt_index(group_id, 17, seed=3) for group_id in range(51)]
    orders = [[index for epoch, index in visits if epoch == e] for e in range(3)]
    assert all(sorted(order) == list(range(17)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_depends_on_the_seed_only():
    first = [prompt_index(g, 100, seed=1) for g in range(100)]
    assert first == [prompt_index(g, 100, seed=1) for g in range(100)]
    assert first != [prompt_index(g, 100, seed=2) for g in range(100)]


def test_negative_groups_and_empty_splits_are_refused():
    with pytest.raises(ValueError, match="group_id"):
        prompt_index(-1, 10, 0)
    with pytest.raises(ValueError, match="0 prompts"):
        prompt_index(0, 0, 0)


def test_sample_seeds_are_stable_distinct_and_fit_63_bits():
    seeds = {sample_seed(r, g, m) for r in range(5) for g in range(20) for m in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 2) == SEED_OF_0_1_2
    assert sample_seed(1, 11, 1) != sample_seed(11, 1, 1)


SEED_OF_0_1_2 = 603432347784401458
"""Pinned: a resumed run must draw what the first one would have drawn."""
