"""The noise floor: what thresholds do to tokens of staleness 0, and how it is shown."""

import io
import math
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from headway.algorithms import compute_loss, noise_floor
from headway.report.noise import noise_tables
from headway.runtime.noise import EngineNoise

NAN = torch.nan


def tensors(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_an_engine_that_agrees_exactly_has_no_floor_and_loses_no_token():
    logprobs = tensors([-1.0, -2.0], [-3.0, NAN])
    floor = noise_floor(logprobs, logprobs, tensors([0.5, 1.0], [0.0, NAN]), tensors([1, 1], [1, 0]))
    assert (floor.num_tokens, floor.max_abs_delta, floor.max_abs_response_delta, floor.k3) == (3, 0, 0, 0)
    assert {cut.share for cut in floor.cuts} == {0}


def test_numbers_are_those_of_the_definition():
    behavior = tensors([-1.0, -1.0, -1.0, NAN])
    delta = tensors([0.2, -0.005, 0.001, NAN])
    floor = noise_floor(behavior + delta, behavior, tensors([0.02, 0.6, 5.0, NAN]), tensors([1, 1, 1, 0]))
    assert floor.mean_abs_delta == pytest.approx(0.206 / 3)
    assert floor.max_abs_delta == floor.p99_abs_delta == pytest.approx(0.2)
    assert floor.max_abs_response_delta == pytest.approx(0.196)
    assert floor.k3 == pytest.approx(sum(math.expm1(d) - d for d in (0.2, -0.005, 0.001)) / 3)
    shares = {(cut.method, cut.threshold): cut.share for cut in floor.cuts}
    # δ² / (H + 0.01) of the first token is 0.04 / 0.03 = 1.33.
    assert [shares["estr", f"tau {tau}"] for tau in (0.7, 1.0, 1.6)] == pytest.approx([1 / 3, 1 / 3, 0])
    assert shares["ppo", "clip 0.2, either side"] == pytest.approx(1 / 3)  # e^0.2 > 1.2
    assert [shares["decoupled_masked", f"band {c}"] for c in (1.003, 1.01, 1.03)] == pytest.approx(
        [2 / 3, 1 / 3, 1 / 3]
    )


def test_every_token_lies_in_one_entropy_bin():
    entropy = torch.linspace(-1e-7, 3, 500, dtype=torch.float64).unsqueeze(0)
    behavior = torch.full_like(entropy, -1.0)
    floor = noise_floor(behavior + entropy, behavior, entropy, torch.ones_like(entropy))
    assert len(floor.bins) == 6
    assert sum(one.share for one in floor.bins) == pytest.approx(1)
    assert all(one.high is None or one.max_abs_delta < one.high for one in floor.bins)
    assert floor.bins[2].mean_abs_delta == pytest.approx(0.3, abs=0.01)  # δ = H here, and the bin is [0.1, 0.5)


def test_what_it_calls_wrongly_cut_is_what_estr_masks():
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(4, 50, generator=generator, dtype=torch.float64)
    logprobs = behavior + 0.2 * torch.randn(4, 50, generator=generator, dtype=torch.float64)
    entropy = torch.rand(4, 50, generator=generator, dtype=torch.float64) * 0.1
    mask = torch.rand(4, 50, generator=generator) < 0.7
    floor = noise_floor(logprobs, behavior, entropy, mask)
    for cut, tau in zip(floor.cuts, (0.7, 1.0, 1.6), strict=False):
        _, metrics = compute_loss(
            "estr",
            logprobs=logprobs,
            behavior_logprobs=behavior,
            behavior_entropy=entropy,
            advantages=torch.ones_like(logprobs),
            mask=mask,
            tau=tau,
        )
        assert cut.share == pytest.approx(float(metrics["masked_fraction"])) and cut.share > 0


def test_no_sampled_token_is_refused():
    with pytest.raises(ValueError, match="at least one sampled token"):
        noise_floor(tensors([0.0]), tensors([0.0]), tensors([0.0]), tensors([0.0]))


def noisy(**changes: object) -> dict[str, torch.Tensor]:
    """Four responses with noise on everything, so that every threshold cuts some tokens and keeps others."""
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(4, 50, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    offsets = tensors([0.0], [3e-4], [4e-3], [-4e-3])
    return {
        "logprobs": behavior + noise - noise.mean(1, keepdim=True) + offsets,
        "behavior_logprobs": behavior,
        "behavior_entropy": torch.rand(4, 50, generator=generator, dtype=torch.float64),
        "mask": torch.ones(4, 50, dtype=torch.bool),
    }


@pytest.mark.parametrize(
    ("algorithm", "params", "metric"),
    [
        ("estr", {"tau": 0.4, "entropy_floor": 0.1}, "masked_fraction"),
        ("decoupled_masked", {"band": 1.5}, "band_fraction"),
        ("mis", {"level": "geometric"}, "kept_fraction"),
        ("mis", {"level": "sequence", "low": 0.9}, "kept_fraction"),
        ("mis", {"low": 0.4, "high": 1.2}, "kept_fraction"),
        ("icepop", {"low": 0.4}, "kept_fraction"),
        ("ppo", {"eps_low": 0.1}, "stopped_fraction"),
        ("dapo", {}, "stopped_fraction"),
        ("gspo", {"eps_low": 2e-3}, "stopped_fraction"),
    ],
)
def test_a_run_is_judged_by_its_own_thresholds_as_its_loss_applies_them(algorithm: str, params: dict, metric: str):
    data = noisy()
    own = noise_floor(**data, algorithm=algorithm, params=params).cuts[0]
    assert own.method == algorithm and own.threshold.endswith("as configured")

    def measured(advantage: float) -> float:
        advantages = torch.full_like(data["logprobs"], advantage)
        # Clips around the proximal policy are open here: it is the policy being trained.
        _, metrics = compute_loss(
            algorithm, **data, proximal_logprobs=data["logprobs"], advantages=advantages, **params
        )
        return float(metrics[metric])

    if metric == "stopped_fraction":  # a clip stops each side under one sign of the advantage
        share = measured(1.0) + measured(-1.0)
    else:
        share = 1 - measured(1.0) if metric in ("kept_fraction", "band_fraction") else measured(1.0)
    assert own.share == pytest.approx(share) and 0 < share < 1


def test_a_cap_cuts_what_lies_above_it_and_every_published_threshold_is_judged_once():
    data = noisy()
    cuts = noise_floor(**data).cuts
    ratio = (data["logprobs"] - data["behavior_logprobs"]).exp()
    (tis,) = (cut for cut in cuts if cut.method == "tis")
    assert tis.threshold == "token cap 2.0" and tis.share == pytest.approx(float((ratio > 2).double().mean()))
    names = [(cut.method, cut.threshold) for cut in cuts]
    assert len(set(names)) == len(names) == 11
    assert [cut.method for cut in noise_floor(**data, algorithm="estr").cuts].count("estr") == 1
    assert noise_floor(**data, algorithm="sat").cuts[0].threshold == "tau 0.7"


def shown(delta: float, algorithm: str = "grpo") -> str:
    behavior = tensors([-1.0, -1.0])
    floor = noise_floor(
        behavior + delta, behavior, tensors([0.01, 0.01]), tensors([1, 1]), algorithm=algorithm, params={}
    )
    noise = EngineNoise("runs/[m]", "addition", "torch", "bfloat16", "bfloat16", 3, 1.0, 0.9, 1, algorithm, floor)
    console = Console(width=120, record=True, file=io.StringIO())
    for part in noise_tables(asdict(noise)):
        console.print(part, markup=False)
    return " ".join(console.export_text().split())


def test_where_nothing_is_cut_everything_is_fine_and_no_mend_is_offered():
    text = shown(0.0, "sat")
    assert text.count("fine") == 11 and "too high" not in text and "cuts too much" not in text
    assert "runs/[m]" in text and "sat, the algorithm of the settings, has no threshold" in text
    assert "sampling.top_p = 1" in text


def test_where_tokens_are_cut_the_verdict_and_a_mend_for_each_method_are_shown():
    text = shown(2.0)
    assert text.count("too high") == 11
    for method in ("estr", "grpo", "gspo", "decoupled_masked", "mis", "tis", "icepop"):
        assert f"{method} cuts too much" in text
    for mend in ("algorithm_params.tau", "algorithm_params.band", "algorithm_params.eps_low", "model.dtype"):
        assert mend in text
