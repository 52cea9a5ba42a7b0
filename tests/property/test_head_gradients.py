"""The fused head against the plain `log_softmax` route, in float64, for any shape, chunk and incoming gradient."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.models.head import gathered_logprobs, token_logprobs
from headway.models.tiles import Tiles

sizes = st.tuples(
    st.integers(1, 7), st.integers(1, 5), st.integers(1, 23), st.integers(1, 4), st.integers(1, 30), st.integers(1, 8)
)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, ids), -(logp.exp() * logp).sum(-1)


@settings(max_examples=60, deadline=None)
@given(sizes, st.floats(0.2, 3.0), st.booleans(), st.integers(0, 99))
def test_values_and_gradients_equal_the_plain_route(
    shape: tuple[int, ...], temperature: float, with_bias: bool, seed: int
) -> None:
    n, d, v, k, vocab_chunk, token_chunk = shape
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=rng, dtype=torch.float64)
    weight = 3 * torch.randn(v, d, generator=rng, dtype=torch.float64)
    bias = torch.randn(v, generator=rng, dtype=torch.float64) if with_bias else None
    ids = torch.randint(v, (n, k), generator=rng)
    grad = torch.randn(n, k, generator=rng, dtype=torch.float64) * (torch.rand(n, 1, generator=rng) < 0.7)

    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    expected, expected_entropy = plain(hidden, weight, bias, ids, temperature)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    tiles = Tiles(rows=token_chunk, columns=vocab_chunk)
    got, _ = gathered_logprobs(hidden, weight, ids, temperature=temperature, tiles=tiles, bias=bias)
    grads = torch.autograd.grad(got, leaves, grad)
    first, entropy = token_logprobs(hidden, weight, ids[:, 0], temperature=temperature, tiles=tiles, bias=bias)

    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(first, expected[:, 0], rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=0, atol=1e-10)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
def test_gradcheck_by_finite_differences(n: int, v: int, chunk: int) -> None:
    rng = torch.Generator().manual_seed(n * 100 + v)
    hidden = torch.randn(n, 3, generator=rng, dtype=torch.float64).requires_grad_()
    weight = torch.randn(v, 3, generator=rng, dtype=torch.float64).requires_grad_()
    bias = torch.randn(v, generator=rng, dtype=torch.float64).requires_grad_()
    targets = torch.randint(v, (n,), generator=rng)

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, targets, temperature=0.7, tiles=Tiles(columns=chunk), bias=bias)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))
