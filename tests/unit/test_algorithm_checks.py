"""Losses that could never learn are refused before anything starts."""

from typing import Any

import pytest
import torch

from headway.algorithms import ALGORITHMS, compute_distillation_loss, compute_loss, vcpo_lr_scale
from headway.algorithms.corrections import decoupled_masked_loss
from headway.algorithms.proximal import loglinear_bounds, loglinear_proximal
from headway.config import ConfigError, parse_config
from headway.runtime.checks import check_algorithm, check_losses
from headway.runtime.methods import MethodError, parse_methods


def settings(algorithm: str, **params: Any) -> dict[str, Any]:
    proximal = {"proximal": "ewma"} if algorithm == "ppo_ewma" else {}
    return {"algorithm": algorithm, "algorithm_params": params, **proximal}


@pytest.mark.parametrize("source", ["exact_snapshot", "exact_model", "exact_interrupt", "ewma"])
def test_a_source_that_would_score_with_other_experts_than_the_replayed_ones_is_refused(source: str) -> None:
    replaying = {"algorithm": "decoupled_ppo", "proximal": source, "routing_replay": True}
    mend = r'experts of its own choice.*set proximal to "train_start", "behavior" or "loglinear"'
    with pytest.raises(ConfigError, match=mend):
        check_losses(parse_config(replaying))
    check_losses(parse_config(replaying | {"routing_replay": False}))
    for allowed in ("train_start", "behavior", "loglinear"):
        check_losses(parse_config(replaying | {"proximal": allowed}))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_passes_with_its_defaults(name: str) -> None:
    check_algorithm(parse_config(settings(name)))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("decoupled_masked", {"band": 0.9}),
        ("decoupled_ppo", {"cap": 0.5}),
        ("mis", {"low": 2.0, "high": 3.0}),
        ("icepop", {"low": 1.5}),
        ("estr", {"tau": -1.0}),
    ],
)
def test_bounds_that_stop_even_fresh_data_are_refused(name: str, params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"{name} would not even learn.*must hold the ratio 1"):
        check_algorithm(parse_config(settings(name, **params)))


@pytest.mark.parametrize(
    ("name", "params", "complaint"),
    [
        ("decoupled_masked", {"band": float("nan")}, "band is nan, but must be a number"),
        ("decoupled_masked", {"band": 0}, "band is 0, but must be a number above 0"),
        ("decoupled_masked", {"discrepancy_weight": "no"}, "discrepancy_weight is 'no', but must be true or false"),
        ("ppo_ewma", {"cap": 0}, "cap is 0, but must be a number above 0"),
        ("tis", {"cap": -2.0}, "cap is -2.0, but must be a number above 0"),
        ("tis", {"level": ["token"]}, "level is .*, but must be a name"),
        ("ppo", {"eps_low": 1e300}, "eps_low is 1e.300, but must be a number within .*or inf"),
        ("ppo", {"eps_low": True}, "eps_low is True, but must be a number"),
        ("ppo", {"dual_clip": 0.5}, "dual_clip is 0.5, but must be from 1 to inf"),
        ("decoupled_ppo", {"eps": -0.1}, "eps is -0.1, but must be from 0 to inf"),
        ("cispo", {"eps_low": -3}, "eps_low is -3, but must be from 0 to inf"),
        ("mis", {"low": 2.0, "high": 1.0}, "low is 2.0, above high, which is 1.0"),
        ("asympo", {"p_low": 0.5, "p_high": 0.1}, "p_low is 0.5, above p_high, which is 0.1"),
        ("sat", {"quantile": 7}, "quantile is 7, but must be from 0 to 1"),
        ("asympo", {"p_low": -1.0}, "p_low is -1.0, but must be a number above 0"),
        ("estr", {"reduction": "fixed", "l_max": 0}, "l_max is 0, but must be a number above 0"),
        ("estr", {"reduction": "sum"}, "unknown reduction 'sum'"),
        ("asympo", {"p_low": float("inf")}, "p_low is inf, but must be from 0 to 1"),
        ("spo", {"p_high": 95}, "p_high is 95, but must be from 0 to 1"),
        ("asympo", {"floor": 0}, "floor is 0, but must be from 1e-30 to inf"),
        ("spo", {"alpha": float("inf")}, r"alpha is inf, but must be from 0 to 1e\+38"),
        ("ppo", {"eps_low": 10**39}, r"eps_low is 10+, but must be a number within ±1e\+38, or inf"),
        ("sapo", {"reduction": "fixed", "l_max": 1e-300}, "has no finite loss"),
    ],
)
def test_values_of_the_wrong_kind_or_range_are_refused_by_name(
    name: str, params: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_algorithm(parse_config(settings(name, **params)))


@pytest.mark.parametrize(
    ("name", "params"),
    [("decoupled_masked", {"eps": 0.0}), ("tis", {"cap": 0.5}), ("spo", {"alpha": 0.0}), ("gspo", {"eps_low": 0.0})],
)
def test_tight_but_meaningful_values_pass(name: str, params: dict[str, float]) -> None:
    check_algorithm(parse_config(settings(name, **params)))


@pytest.mark.parametrize("params", [{"eps_low": 10**22}, {"eps_high": 10**37}, {"dual_clip": 2**63}])
def test_integers_that_torch_does_not_hold_are_loose_bounds_like_any_other(params: dict[str, int]) -> None:
    check_algorithm(parse_config(settings("ppo", **params)))


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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_responses_without_any_column_give_no_loss(name: str) -> None:
    empty = torch.zeros(2, 0)
    tensors = dict.fromkeys(("advantages", "mask", "behavior_logprobs", "behavior_entropy"), empty)
    loss, _ = compute_loss(name, logprobs=empty.clone().requires_grad_(), group=torch.zeros(2), **tensors)
    assert loss.item() == 0.0


def test_logprobs_that_carry_no_gradient_and_lists_are_refused_by_name() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"ppo: logprobs has dtype torch.int64"):
        compute_loss("ppo", logprobs=ones.long(), behavior_logprobs=ones, advantages=ones, mask=ones)
    with pytest.raises(TypeError, match=r"ppo: behavior_logprobs is a list, expected a tensor"):
        compute_loss("ppo", logprobs=ones, behavior_logprobs=[[0.0, 0.0]], advantages=ones, mask=ones)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ppo: logprobs is a ndarray, expected a tensor \[B, T\]"):
        compute_loss("ppo", logprobs=ones.numpy(), behavior_logprobs=ones, advantages=ones, mask=ones)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_halves_give_the_loss_of_the_same_numbers_in_float32(name: str, dtype: torch.dtype) -> None:
    """70,000 tokens, more than float16 counts, and a log-ratio of 20, whose ratio it cannot hold."""
    rng = torch.Generator().manual_seed(0)
    behavior = -(torch.rand(700, 100, generator=rng) + 0.1).to(dtype)
    behavior[0] = -20
    logprobs = (behavior - 0.1 * torch.rand(700, 100, generator=rng)).to(dtype)
    logprobs[0] = -0.01
    advantages = torch.where(torch.arange(700) % 2 == 0, 1.0, -1.0).to(dtype).unsqueeze(1).expand(700, 100)
    shared: dict[str, Any] = {"mask": torch.ones(700, 100), "group": torch.arange(700) // 4}
    halves = {"logprobs": logprobs, "behavior_logprobs": behavior, "behavior_entropy": -behavior}
    losses = []
    for tensors in ({**halves, "advantages": advantages}, {k: t.float() for k, t in halves.items()}):
        live = tensors.pop("logprobs").requires_grad_()
        loss, metrics = compute_loss(name, logprobs=live, **{"advantages": advantages.float(), **tensors}, **shared)
        assert all(value.isfinite() for value in metrics.values())
        (gradient,) = torch.autograd.grad(loss, live)
        assert gradient.isfinite().all() and gradient.dtype == live.dtype
        losses.append(loss)
    assert losses[0].dtype == torch.float32 and torch.equal(*losses)


@pytest.mark.parametrize("label", ["estr:reduction=fixed", "tis:level=word", "decoupled_masked:band=0.5"])
def test_compare_refuses_what_a_run_would_refuse(label: str) -> None:
    with pytest.raises(MethodError):
        parse_methods(label, parse_config({}))


def test_a_mask_of_weights_is_refused_and_one_of_ones_and_zeros_is_not() -> None:
    ones = torch.ones(2, 2)
    arguments: dict[str, Any] = {"logprobs": -ones, "behavior_logprobs": -ones, "advantages": ones}
    compute_loss("ppo", mask=torch.tensor([[1, 0], [1, 1]]), **arguments)
    with pytest.raises(ValueError, match=r"ppo: mask holds 0\.5, but a token trains"):
        compute_loss("ppo", mask=0.5 * ones, **arguments)
    with pytest.raises(ValueError, match=r"mc_no_ratio: mask holds 0\.5, but a token trains"):
        cached = -ones.unsqueeze(-1)
        compute_distillation_loss("mc_no_ratio", student_logprobs=cached, teacher_logprobs=cached, mask=0.5 * ones)


def test_the_vcpo_scale_is_that_of_the_ratios_to_each_other_however_far_the_batch_has_drifted() -> None:
    log_ratios = torch.tensor([0.0, -1.0, -100.0])
    expected, ess = vcpo_lr_scale(log_ratios)
    assert 0.5 < expected < 1 < ess < 3
    for found in zip(vcpo_lr_scale(log_ratios - 1000), (expected, ess), strict=True):
        torch.testing.assert_close(*found, rtol=1e-4, atol=0)
