"""Small parts by closed form: weights, advantages, diagnostics, proximal arithmetic, the learning-rate scale."""

import math

import pytest
import torch

from headway.algorithms import (
    compute_advantages,
    ewma_beta,
    ewma_step,
    loglinear_bounds,
    loglinear_proximal,
    policy_diagnostics,
    response_log_ratios,
    response_weights,
    token_weights,
    vcpo_lr_scale,
)

torch.set_num_threads(1)

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
GROUP = torch.tensor([7, 7, 7, 2])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0, 1 / 6]),
        ("seq_mean_token_mean", [1 / 9, 1 / 3, 0, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("fixed", [1 / 30, 1 / 30, 0, 1 / 30]),
        ("group_mean", [1 / 12, 1 / 4, 0, 1 / 4]),
    ],
)
def test_weights_of_each_reduction(reduction: str, expected: list[float]) -> None:
    weights = token_weights(reduction, MASK, GROUP, l_max=10, dtype=torch.float64)
    assert torch.allclose(weights, torch.tensor(expected).double().unsqueeze(1) * MASK)
    counts = MASK.sum(1)
    assert torch.equal(response_weights(reduction, counts, GROUP, l_max=10), torch.tensor(expected)) or torch.allclose(
        response_weights(reduction, counts, GROUP, l_max=10), torch.tensor(expected)
    )


def test_equal_rewards_teach_exactly_nothing_and_are_counted() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0])
    for name in ("grpo", "centered", "rloo"):
        advantages, metrics = compute_advantages(name, rewards=rewards, group=torch.tensor([0, 0, 0, 1]))
        assert advantages.tolist() == [0.0] * 4
        assert metrics["num_groups"] == 2
        assert metrics["num_degenerate_groups"] == 2


def test_diagnostics_by_hand() -> None:
    delta = torch.tensor([[math.log(2.0), -math.log(2.0)]], dtype=torch.float64)
    metrics = policy_diagnostics(delta, torch.zeros(1, 2).double(), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2))
    assert torch.isclose(metrics["mean_abs_delta"], torch.tensor(math.log(2.0)).double())
    assert torch.isclose(metrics["max_ratio"], torch.tensor(2.0).double())
    assert torch.isclose(metrics["k3_behavior_policy"], torch.tensor(0.25).double())
    assert torch.isclose(metrics["k3_policy_behavior"], torch.tensor(0.25).double())
    assert torch.isclose(metrics["ess_tokens"], torch.tensor(2.5**2 / (2 * 4.25)).double())
    assert metrics["ess_responses"] == 1
    assert metrics["share_positive_up"] == metrics["share_negative_down"] == 0.5
    assert metrics["share_positive_down"] == metrics["share_negative_up"] == 0


def test_k3_is_the_kl_in_the_direction_its_name_says() -> None:
    behavior = torch.tensor([0.5, 0.3, 0.2]).double().log()
    policy = torch.tensor([0.4, 0.4, 0.2]).double().log()
    terms = [
        policy_diagnostics(policy[None, [a]], behavior[None, [a]], torch.zeros(1, 1), torch.ones(1, 1))[
            "k3_behavior_policy"
        ]
        for a in range(3)
    ]
    expected = (behavior.exp() * (behavior - policy)).sum()
    assert torch.isclose(behavior.exp() @ torch.stack(terms), expected)


@pytest.mark.parametrize(
    ("behind", "band", "clip"),
    [
        (1, (0.9801, 1.0201), (0.9940, 1.0080)),
        (2, (0.9850, 1.0150), (0.9910, 1.0120)),
        (3, (0.9867, 1.0134), (0.9881, 1.0161)),
    ],
)
def test_loglinear_bounds_are_the_published_ones(
    behind: int, band: tuple[float, float], clip: tuple[float, float]
) -> None:
    """Rounded to four places, so that the 1.0133 and 1.0162 in print (1.01336 and 1.01610) would not pass."""
    actual_band, actual_clip = loglinear_bounds((0.990, 1.010), (0.997, 1.004), behind)
    assert actual_band == pytest.approx(band, rel=0, abs=5e-5)
    assert actual_clip == pytest.approx(clip, rel=0, abs=5e-5)


def test_loglinear_at_gap_zero_is_the_sampler_and_refuses_the_future() -> None:
    logprobs, behavior = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
    assert torch.equal(loglinear_proximal(logprobs, behavior, torch.tensor([[4, 4]]), 4), behavior)
    with pytest.raises(ValueError, match="versions hold 5, newer than the trained version 4"):
        loglinear_proximal(logprobs, behavior, torch.tensor([[4, 5]]), 4)


def test_averages_start_at_the_first_parameters_and_refuse_nonsense() -> None:
    assert ewma_step(0.0, 0.5).theta_share == 1.0
    assert ewma_step(1.5, 0.5, restart=True).theta_share == 1.0
    assert ewma_beta(0) == 0.0
    with pytest.raises(ValueError, match=r"beta 1\.0"):
        ewma_step(0.0, 1.0)
    with pytest.raises(ValueError, match="weight -1"):
        ewma_step(-1.0, 0.5)
    with pytest.raises(ValueError, match="window -1"):
        ewma_beta(-1)


def test_the_learning_rate_is_whole_on_policy_and_small_when_one_response_dominates() -> None:
    scale, ess = vcpo_lr_scale(torch.zeros(9))
    assert scale == 1
    assert ess == 9
    scale, ess = vcpo_lr_scale(torch.tensor([0.0, -200.0, -200.0, -200.0]))
    assert torch.isclose(scale, torch.tensor(0.5))
    assert torch.isclose(ess, torch.tensor(1.0))
    scale, _ = vcpo_lr_scale(torch.full((4,), -1000.0))
    assert torch.isfinite(scale)
    with pytest.raises(ValueError, match="at least one response"):
        vcpo_lr_scale(torch.zeros(0))


def test_response_log_ratios_skip_masked_tokens_and_empty_responses() -> None:
    logprobs = torch.tensor([[-1.0, float("nan")], [0.0, 0.0]])
    ratios = response_log_ratios(logprobs, torch.full((2, 2), -3.0), torch.tensor([[1, 0], [0, 0]]))
    assert ratios.tolist() == [2.0]
