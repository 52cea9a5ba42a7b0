"""Losses that could never learn are refused before anything starts."""

from typing import Any

import pytest
import torch

from headway.algorithms import ALGORITHMS
from headway.algorithms.corrections import decoupled_masked_loss
from headway.algorithms.proximal import loglinear_bounds, loglinear_proximal
from headway.config import ConfigError, parse_config
from headway.runtime.checks import check_algorithm


def settings(algorithm: str, **params: Any) -> dict[str, Any]:
    proximal = {"proximal": "ewma"} if algorithm == "ppo_ewma" else {}
    return {"algorithm": algorithm, "algorithm_params": params, **proximal}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_passes_with_its_defaults(name: str) -> None:
    check_algorithm(parse_config(settings(name)))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("decoupled_masked", {"band": 0.9}),
        ("decoupled_masked", {"band": float("nan")}),
        ("decoupled_masked", {"eps": -0.1}),
        ("decoupled_ppo", {"eps": -0.1}),
        ("decoupled_ppo", {"cap": 0.5}),
        ("ppo_ewma", {"cap": 0}),
        ("tis", {"cap": -2.0}),
        ("mis", {"low": 2.0, "high": 1.0}),
        ("icepop", {"low": 1.5}),
        ("estr", {"tau": -1.0}),
    ],
)
def test_bounds_that_stop_even_fresh_data_are_refused(name: str, params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"{name} would not even learn.*must hold the ratio 1"):
        check_algorithm(parse_config(settings(name, **params)))


@pytest.mark.parametrize(
    ("name", "params"),
    [("decoupled_masked", {"eps": 0.0}), ("tis", {"cap": 0.5}), ("spo", {"alpha": 0.0}), ("gspo", {"eps_low": 0.0})],
)
def test_tight_but_meaningful_values_pass(name: str, params: dict[str, float]) -> None:
    check_algorithm(parse_config(settings(name, **params)))


@pytest.mark.parametrize("behind", [1, 2, 3, 7])
def test_loglinear_masks_exactly_where_its_transformed_bounds_on_the_whole_ratio_do(behind: int) -> None:
    rng = torch.Generator().manual_seed(behind)
    behavior = -torch.rand(200, 5, generator=rng, dtype=torch.float64) - 0.1
    logprobs = behavior + 0.02 * torch.randn(200, 5, generator=rng, dtype=torch.float64)
    advantages = torch.randn(200, 1, generator=rng, dtype=torch.float64).expand(200, 5)
    proximal = loglinear_proximal(logprobs, behavior, torch.full((200, 5), 9 - behind), 9)
    loss, _ = decoupled_masked_loss(
        logprobs,
        behavior,
        advantages,
        torch.ones(200, 5, dtype=torch.bool),
        proximal_logprobs=proximal,
        eps=0.003,
        eps_high=0.004,
        band=1.01,
        discrepancy_weight=True,
    )
    (low, high), (clip_low, clip_high) = loglinear_bounds((1 / 1.01, 1.01), (0.997, 1.004), behind)
    ratio = (logprobs - behavior).exp()
    wanted = (ratio >= low) & (ratio <= high) & torch.where(advantages >= 0, ratio <= clip_high, ratio >= clip_low)
    assert 0.02 < wanted.double().mean() < 0.98
    assert torch.equal(loss != 0, wanted)
