"""The noise floor: what thresholds do to tokens of staleness 0, and how it is shown."""

import io
import math

import pytest
import torch
from rich.console import Console

from headway.algorithms import compute_loss, noise_floor
from headway.runtime.noise import EngineNoise
from headway.runtime.noise_view import noise_tables

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


@pytest.mark.parametrize(("delta", "verdict"), [(0.0, "fine"), (0.5, "too high")])
def test_the_tables_give_a_verdict_and_a_mend_for_each_method(delta: float, verdict: str):
    behavior = tensors([-1.0, -1.0])
    floor = noise_floor(behavior + delta, behavior, tensors([0.01, 0.01]), tensors([1, 1]))
    noise = EngineNoise("m", "addition", "torch", "bfloat16", "bfloat16", 3, 1.0, 0.9, 1, floor)
    console = Console(width=120, record=True, file=io.StringIO())
    for part in noise_tables(noise):
        console.print(part)
    text = " ".join(console.export_text().split())
    assert text.count(verdict) == len(floor.cuts)
    for mend in ("algorithm_params.tau", "algorithm_params.band", "model.dtype", "sampling.top_p = 1"):
        assert mend in text
