"""The fused head: dtypes, hostile inputs, and what it refuses."""

import pytest
import torch

from headway.models import tiles as tiles_module
from headway.models.head import gathered_logprobs, token_logprobs
from headway.models.head_timing import HeadShape, Timing, fastest, time_heads
from headway.models.tiles import EAGER, HEADS, Tiles


def problem(n: int = 6, d: int = 8, v: int = 50, dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=rng).to(dtype)
    weight = torch.randn(v, d, generator=rng).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(v, (n,), generator=rng)


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    hidden, weight, targets = problem(dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, tiles=Tiles(columns=7))
    exact, exact_entropy = token_logprobs(hidden.float(), weight.float(), targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, exact_entropy, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_autocast_does_not_lower_the_precision() -> None:
    hidden, weight, targets = problem()
    expected, _ = token_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = token_logprobs(hidden, weight, targets)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_nan_token_without_gradient_poisons_nobody() -> None:
    hidden, weight, targets = problem()
    with torch.no_grad():
        hidden[2] = float("nan")
    logprobs, entropy = token_logprobs(hidden, weight, targets, tiles=Tiles(columns=9))
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, False, False, False]
    torch.where(logprobs.isnan(), 0.0, logprobs).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and not hidden.grad[2].any()
    assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = problem()
    logprobs, entropy = token_logprobs(hidden * 1e4, weight, targets, tiles=Tiles(columns=8))
    assert logprobs.isfinite().all() and entropy.isfinite().all()
    torch.testing.assert_close(entropy, torch.zeros(6), atol=1e-4, rtol=0)


def test_uniform_logits_have_log_v_entropy() -> None:
    logprobs, entropy = token_logprobs(
        torch.zeros(3, 4), torch.randn(1000, 4), torch.tensor([0, 1, 2]), tiles=Tiles(columns=64)
    )
    torch.testing.assert_close(entropy, torch.full((3,), 1000.0).log())
    torch.testing.assert_close(logprobs, -entropy)


def test_only_the_asked_gradients_are_computed() -> None:
    hidden, weight, targets = problem()
    token_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    assert not token_logprobs(hidden, weight, targets)[1].requires_grad


def test_no_tokens_give_no_logprobs() -> None:
    logprobs, entropy = token_logprobs(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)


def test_bad_requests_are_refused_by_name() -> None:
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match="temperature > 0"):
        token_logprobs(hidden, weight, targets, temperature=0)
    with pytest.raises(ValueError, match="leave the vocabulary of 50"):
        gathered_logprobs(hidden, weight, targets.unsqueeze(-1) + 50)
    with pytest.raises(ValueError, match=r"\[6, 8\]"):
        token_logprobs(hidden, weight[:, :4], targets)
    for temperature in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite temperature > 0"):
            token_logprobs(hidden, weight, targets, temperature=temperature)
    with pytest.raises(ValueError, match=r"a bias of \[50\], got \[1, 50\]"):
        token_logprobs(hidden, weight, targets, bias=torch.zeros(1, 50))
    with pytest.raises(ValueError, match=r"integer ids, got torch\.float32"):
        token_logprobs(hidden, weight, targets + 0.7)
    with pytest.raises(ValueError, match=r"rows of ids, got \[6, 8\], \[50, 8\] and \[6, 1, 1\]"):
        token_logprobs(hidden, weight, targets.unsqueeze(-1))


def test_the_gradient_of_a_half_bias_is_rounded_once_whatever_the_tiles() -> None:
    hidden, weight, targets = problem(n=4000, dtype=torch.bfloat16)
    bias = torch.zeros(50, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for rows in (8, 4000):
        logprobs, _ = token_logprobs(hidden, weight, targets, bias=bias, tiles=Tiles(rows=rows))
        found.append(torch.autograd.grad(logprobs.sum(), bias)[0].float())
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_agrees_with_cpu(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(n=64, d=128, v=3000, dtype=dtype)
    expected, expected_entropy = token_logprobs(hidden, weight, targets)
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    on_gpu = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
    got, entropy = token_logprobs(on_gpu[0], on_gpu[1], targets.cuda())
    grads = torch.autograd.grad(got.sum(), on_gpu)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.cpu(), expected_entropy, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tiles", [Tiles(rows=4, columns=19, compiled=True), HEADS["eager_wide"]])
def test_every_candidate_gives_the_same_values_and_exact_gradients(tiles: Tiles) -> None:
    hidden, weight, targets = problem(n=10, v=50, dtype=torch.float64)
    bias = torch.linspace(-1, 1, 50, dtype=torch.float64).requires_grad_()
    grad = torch.linspace(-1, 1, 10, dtype=torch.float64)
    grad[3] = 0  # rows without a gradient leave the tiles of backward partly filled
    found = {}
    for name, candidate in {"eager": EAGER, "other": tiles}.items():
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, tiles=candidate, bias=bias)
        grads = torch.autograd.grad(logprobs, (hidden, weight, bias), grad)
        found[name] = (logprobs.detach(), entropy, *grads)
    for ours, theirs in zip(found["other"], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_compiled_bits_do_not_depend_on_what_came_before() -> None:
    tiles = Tiles(rows=4, columns=19, compiled=True)
    hidden, weight, targets = problem(n=9)
    alone, _ = token_logprobs(hidden[:3], weight, targets[:3], tiles=tiles)
    among, _ = token_logprobs(hidden, weight, targets, tiles=tiles)
    again, _ = token_logprobs(hidden[:3], weight, targets[:3], tiles=tiles)
    assert torch.equal(alone, again)
    torch.testing.assert_close(among[:3], alone, rtol=0, atol=1e-6)


def test_the_fastest_candidate_within_the_memory_bound_is_taken() -> None:
    shape = HeadShape(tokens=100, hidden=8, vocabulary=1000)
    fifth = 4 * 100 * 1000 // 5
    timings: dict[str, Timing | str] = {
        "eager": Timing(3.0, 500),
        "compiled": Timing(2.0, 500 + fifth),
        "wide": Timing(1.0, 501 + fifth),
        "broken": "no compiler",
    }
    assert fastest(timings, shape, default="eager") == "compiled"
    assert fastest({"eager": "out of memory"}, shape, default="eager") == "eager"


def test_a_candidate_that_cannot_run_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(tiles_module, "_compiled", refuse)
    shape = HeadShape(tokens=5, hidden=4, vocabulary=30)
    found = time_heads({"eager": EAGER, "compiled": HEADS["compiled"]}, shape, dtype=torch.float32, device="cpu")
    assert found["compiled"] == "no compiler"
    assert isinstance(found["eager"], Timing) and found["eager"].seconds > 0
