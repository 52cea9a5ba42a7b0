"""The table, and what the door refuses."""

import inspect
from typing import Any

import pytest
import torch

from headway.algorithms import ADVANTAGES, ALGORITHMS, REDUCTIONS, compute_advantages, compute_loss, find_algorithm
from headway.algorithms.compute import RUN_SETTINGS

torch.set_num_threads(1)


def arguments(**changes: Any) -> dict[str, Any]:
    full = torch.full((2, 3), -1.0)
    tensors = {
        "logprobs": full,
        "advantages": torch.ones(2, 3),
        "mask": torch.ones(2, 3),
        "group": torch.zeros(2, dtype=torch.long),
        "behavior_logprobs": full,
        "behavior_entropy": torch.ones(2, 3),
    }
    return {key: value for key, value in {**tensors, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_of_the_table_is_complete_and_its_defaults_are_the_keywords_of_its_loss(name: str) -> None:
    row = ALGORITHMS[name]
    keywords = {
        parameter.name
        for parameter in inspect.signature(row.loss).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    supplied = {"behavior_entropy", "proximal_logprobs", "weights", "quantile_value", "moment_bound"}
    assert row.name == name
    assert keywords - supplied == set(row.defaults) - set(RUN_SETTINGS)
    assert row.advantage in ADVANTAGES
    assert row.reduction in REDUCTIONS
    assert row.paper and row.summary
    assert (row.statistics is not None) == ("scope" in row.defaults)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_an_algorithm_does_not_need_may_be_missing(name: str) -> None:
    needs = ALGORITHMS[name].needs
    optional = {key: None for key in ("behavior_logprobs", "behavior_entropy") if key not in needs}
    compute_loss(name, **arguments(**optional))


@pytest.mark.parametrize("key", ["behavior_logprobs", "behavior_entropy"])
def test_a_missing_tensor_is_named_with_the_mend(key: str) -> None:
    with pytest.raises(ValueError, match=f"estr needs {key}, which is missing: let the engine return"):
        compute_loss("estr", **arguments(**{key: None}))


def test_group_mean_asks_for_the_group() -> None:
    with pytest.raises(ValueError, match="'group_mean' needs group"):
        compute_loss("asympo", **arguments(group=None))


def test_misspelt_names_meet_their_nearest_neighbor() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'asimpo'; did you mean 'asympo'"):
        find_algorithm("asimpo")
    with pytest.raises(ValueError, match="estr has no parameter 'eps_hi'; did you mean 'eps_high'"):
        compute_loss("estr", **arguments(), eps_hi=0.1)
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        compute_loss("ppo", **arguments(), reduction="mean")
    with pytest.raises(ValueError, match="unknown advantage 'gae'"):
        compute_advantages("gae", rewards=torch.ones(2), group=torch.zeros(2))


@pytest.mark.parametrize("key", ["advantages", "mask", "behavior_logprobs", "weights"])
def test_shapes_that_do_not_match_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"ppo: {key} has shape \(2, 2\), expected \(2, 3\)"):
        compute_loss("ppo", **arguments(**{key: torch.zeros(2, 2)}))


def test_a_group_of_another_length_and_flat_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group has shape \(3,\), expected \(2,\)"):
        compute_loss("asympo", **arguments(group=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"expected \[B, T\]"):
        compute_loss("ppo", **arguments(logprobs=torch.zeros(3)))


@pytest.mark.parametrize("name", ["topr", "opsm"])
def test_one_advantage_per_response_is_insisted_on(name: str) -> None:
    mixed = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
    with pytest.raises(ValueError, match=f"{name} needs one advantage per response, but those of sample 1 differ"):
        compute_loss(name, **arguments(advantages=mixed))


def test_whole_batch_statistics_depend_on_the_scope_and_are_not_forgotten() -> None:
    assert "whole_batch" not in ALGORITHMS["sat"].needs_for()
    assert "whole_batch" in ALGORITHMS["sat"].needs_for({"scope": "batch"})
    assert "whole_batch" in ALGORITHMS["m2po"].needs_for()
    with pytest.raises(ValueError, match="needs statistics of the whole batch"):
        compute_loss("m2po", **arguments(), weights=torch.ones(2, 3))
    with pytest.raises(ValueError, match="scope 'token' must be one of"):
        compute_loss("sat", **arguments(), scope="token")


def test_levels_of_importance_sampling_are_checked() -> None:
    with pytest.raises(ValueError, match="tis: level 'geometric'"):
        compute_loss("tis", **arguments(), level="geometric")
    with pytest.raises(ValueError, match="mis: level 'word'"):
        compute_loss("mis", **arguments(), level="word")


def test_fixed_reduction_asks_for_the_length() -> None:
    with pytest.raises(ValueError, match="'fixed' needs l_max"):
        compute_loss("ppo", **arguments(), reduction="fixed")
