"""The parameter average of PPO-EWMA."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.proximal.averages import ParameterAverage

GOLDEN = Path(__file__).parents[1] / "golden" / "cases.npz"
FIELDS = (("inputs", "theta"), ("expected", "theta_prox"))


def trajectory(steps: int = 5) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [{"a": torch.randn(3, generator=rng, dtype=torch.float64)} for _ in range(steps)]


def test_the_average_weighs_the_past_by_powers_of_beta() -> None:
    average, thetas = ParameterAverage(window=4), trajectory()
    for k, theta in enumerate(thetas, 1):
        powers = torch.tensor([(4 / 6) ** (k - 1 - i) for i in range(k)], dtype=torch.float64)
        expected = sum(p * t["a"] for p, t in zip(powers, thetas, strict=False)) / powers.sum()
        torch.testing.assert_close(average.update(theta)["a"], expected, rtol=0, atol=1e-12)


def test_the_first_update_and_a_reset_copy_the_parameters() -> None:
    average, (first, second, third, *_) = ParameterAverage(window=6), trajectory()
    assert average.update(first)["a"].equal(first["a"])
    average.update(second)
    copy = average.reset(third)["a"]
    assert copy.equal(third["a"]) and copy.data_ptr() != third["a"].data_ptr()


def test_window_zero_is_the_latest_parameters() -> None:
    average = ParameterAverage(window=0)
    for theta in trajectory():
        assert average.update(theta)["a"].equal(theta["a"])


def test_a_saved_average_continues_exactly(tmp_path: Path) -> None:
    straight, resumed, thetas = ParameterAverage(window=3), ParameterAverage(window=3), trajectory()
    for theta in thetas[:3]:
        straight.update(theta)
    straight.save(tmp_path / "average.safetensors")
    resumed.load(tmp_path / "average.safetensors")
    for theta in thetas[3:]:
        assert straight.update(theta)["a"].equal(resumed.update(theta)["a"])
    with pytest.raises(ValueError, match="β"):
        ParameterAverage(window=4).load(tmp_path / "average.safetensors")


def test_foreign_parameters_are_refused() -> None:
    average = ParameterAverage(window=3)
    average.update({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="'b'"):
        average.update({"b": torch.zeros(2)})


@pytest.mark.parametrize("name", ["ppo_ewma_weights", "ppo_ewma_reset"])
def test_golden_averages(name: str) -> None:
    with np.load(GOLDEN, allow_pickle=False) as file:
        cases = [case for case in json.loads(str(file["index"])) if case["method"] == name]
        assert cases
        for case in cases:
            thetas, expected = (torch.from_numpy(file[case[k][v]["array"]]) for k, v in FIELDS)
            active = case["inputs"].get("active_fraction")
            fractions = file[active["array"]] if active else np.ones(len(thetas))
            average = ParameterAverage(window=case["params"]["window"])
            for theta, fraction, wanted in zip(thetas, fractions, expected, strict=True):
                collapsed = fraction < case["params"].get("reset_below", 0.0)
                got = (average.reset if collapsed else average.update)({"theta": theta})["theta"]
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
