"""What holds for every policy loss, whatever the batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_batches import NAMES, Tensors, batches, make_batch, names, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms import ALGORITHMS, batch_statistics, compute_loss, token_weights

FAST = settings(max_examples=80, deadline=None)
SCALED_EVEN_ON_POLICY = {"spo", "asympo"}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@FAST
@given(batches, st.sampled_from([n for n in NAMES if n not in SCALED_EVEN_ON_POLICY]))
def test_at_ratio_one_every_method_is_the_plain_policy_gradient(batch: Tensors, name: str) -> None:
    on_policy = replace(batch, behavior_logprobs=batch.logprobs, proximal_logprobs=batch.logprobs)
    weights = token_weights(ALGORITHMS[name].reduction, batch.mask, batch.group, dtype=torch.float64)
    _, gradient, _ = run(name, on_policy)
    assert same(gradient, -batch.advantages * weights)


@FAST
@given(batches, names)
def test_the_gradient_reaches_only_sampled_tokens_of_the_current_policy(batch: Tensors, name: str) -> None:
    live = {
        key: value.clone().requires_grad_() if value.is_floating_point() else value
        for key, value in vars(batch).items()
    }
    loss, metrics = compute_loss(name, **live)
    loss.backward()
    assert all(value.grad is None for key, value in live.items() if key != "logprobs")
    assert not any(value.requires_grad for value in metrics.values())
    assert torch.equal(live["logprobs"].grad[~batch.mask], torch.zeros_like(batch.logprobs)[~batch.mask])


@FAST
@given(batches, names, st.integers(1, 5))
def test_padding_and_what_it_holds_change_nothing(batch: Tensors, name: str, extra: int) -> None:
    padded = Tensors(
        **{
            key: torch.cat([value, value.new_zeros(len(value), extra)], 1) if value.ndim == 2 else value
            for key, value in vars(batch).items()
        }
    ).with_filler(float("nan"))
    loss, gradient, metrics = run(name, batch)
    padded_loss, padded_gradient, padded_metrics = run(name, padded)
    assert same(loss, padded_loss)
    assert same(gradient, padded_gradient[:, : gradient.shape[1]])
    assert torch.equal(padded_gradient[:, gradient.shape[1] :], torch.zeros(len(gradient), extra).double())
    for key, value in metrics.items():
        assert same(value.double(), padded_metrics[key].double()), key


@FAST
@given(batches, names, st.randoms(use_true_random=False))
def test_the_order_of_responses_and_the_names_of_groups_change_nothing(batch: Tensors, name: str, random) -> None:
    order = list(range(len(batch.group)))
    random.shuffle(order)
    index = torch.tensor(order)
    shuffled = batch.rows(index)
    shuffled = replace(shuffled, group=100 - shuffled.group)
    loss, gradient, _ = run(name, batch)
    shuffled_loss, shuffled_gradient, _ = run(name, shuffled)
    assert same(loss, shuffled_loss)
    assert same(gradient[index], shuffled_gradient)


@FAST
@given(batches, names, st.integers(1, 4))
def test_micro_batches_with_global_weights_add_up_to_the_whole_batch(batch: Tensors, name: str, size: int) -> None:
    params: dict[str, Any] = {"scope": "batch"} if ALGORITHMS[name].statistics else {}
    given_tensors = {key: value for key, value in vars(batch).items() if key != "group"}
    statistics = batch_statistics(name, **given_tensors, **params)
    weights = token_weights(ALGORITHMS[name].reduction, batch.mask, batch.group, dtype=torch.float64)
    loss, gradient, _ = run(name, batch, **params)
    parts = []
    for index in torch.arange(len(batch.group)).split(size):
        parts.append(run(name, batch.rows(index), weights=weights[index], statistics=statistics, **params))
    assert same(torch.stack([part[0] for part in parts]).sum(), loss)
    assert same(torch.cat([part[1] for part in parts]), gradient)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "reduction", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "group_mean"]
)
def test_a_batch_with_nothing_sampled_gives_zero(name: str, reduction: str) -> None:
    batch = make_batch(3)
    batch = replace(batch, mask=torch.zeros_like(batch.mask)).with_filler(float("nan"))
    loss, gradient, metrics = run(name, batch, reduction=reduction, l_max=9)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert all(torch.isfinite(value) for value in metrics.values())


@FAST
@given(batches, names)
def test_zero_advantages_teach_nothing(batch: Tensors, name: str) -> None:
    loss, gradient, _ = run(name, replace(batch, advantages=torch.zeros_like(batch.advantages)))
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", NAMES)
def test_one_token_is_enough(name: str) -> None:
    batch = make_batch(1, num_responses=1, length=1)
    batch = replace(batch, mask=torch.ones(1, 1), advantages=torch.ones(1, 1).double())
    loss, gradient, metrics = run(name, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_broken_samples_far_from_the_sampler_give_no_nan(name: str) -> None:
    batch = make_batch(5, dtype=torch.float32)
    batch = replace(batch, behavior_logprobs=batch.behavior_logprobs - 300, mask=torch.ones_like(batch.mask))
    loss, gradient, metrics = run(name, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@FAST
@given(
    names,
    st.sampled_from(["logprobs", "behavior_logprobs", "advantages"]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.integers(0, 6),
)
def test_non_finite_values_at_sampled_tokens_are_refused_by_sample(name: str, key: str, value: float, row: int) -> None:
    if key == "behavior_logprobs" and key not in ALGORITHMS[name].needs:
        return
    batch = make_batch(11)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    tensor = getattr(batch, key).clone()
    tensor[row, 4] = value
    with pytest.raises(ValueError, match=rf"{name}: {key} of sample {row} is .* at position 4"):
        run(name, replace(batch, **{key: tensor}))


def bits(name: str, batch: Tensors, **params: object) -> tuple[torch.Tensor, torch.Tensor]:
    return run(name, batch, **params)[:2]


PAIRS = [
    ("estr", {"tau": float("inf")}, "dapo", {}),
    ("sat", {"quantile": 0.0}, "ppo", {}),
    ("sat", {"quantile": 1.0}, "ppo", {}),
    ("sat_gspo", {"quantile": 0.0, "eps_low": 0.01, "eps_high": 0.02}, "gspo", {"eps_low": 0.01, "eps_high": 0.02}),
    ("ppo", {"dual_clip": 1e30}, "ppo", {}),
    ("kpop", {"phi": float("inf")}, "ppo", {}),
    ("opsm", {"delta": float("inf")}, "ppo", {}),
    (
        "estr",
        {"eps_low": float("inf"), "eps_high": float("inf"), "tau": float("inf")},
        "m2po",
        {"budget": float("inf")},
    ),
    ("m2po", {"budget": float("inf")}, "dppo_tv", {"delta": 1.0}),
    ("mis", {"low": 0.0, "high": float("inf")}, "mis", {"level": "sequence", "low": 0.0, "high": float("inf")}),
    ("icepop", {"low": 0.0, "high": 1e30}, "decoupled_ppo", {"cap": 1e30}),
    ("tis", {"cap": 1e30}, "decoupled_ppo", {"cap": 1e30}),
    ("ppo_ewma", {"cap": 5.0}, "decoupled_ppo", {}),
    ("asympo", {"p_low": 1e-30, "p_high": 1.0}, "asympo", {}),
    ("spo", {"alpha": 1.0}, "naive", {}),
]


@pytest.mark.parametrize(("name", "loose", "base", "params"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_loose_thresholds_give_the_bits_of_the_base_loss(
    name: str, loose: dict, base: str, params: dict, dtype: torch.dtype, seed: int
) -> None:
    batch = make_batch(seed, dtype=dtype)
    if base != "gspo" and "whole_groups" not in ALGORITHMS[base].needs:
        params = {**params, "reduction": "token_mean"}
        loose = {**loose, "reduction": "token_mean"}
    for a, b in zip(bits(name, batch, **loose), bits(base, batch, **params), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_mis_without_bounds_is_the_clip_around_the_proximal_policy(seed: int) -> None:
    batch = make_batch(seed)
    _, gradient, _ = run("mis", batch, low=0.0, high=float("inf"))
    _, expected, _ = run("ppo", replace(batch, behavior_logprobs=batch.proximal_logprobs))
    assert same(gradient, expected)
