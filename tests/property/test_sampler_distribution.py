"""Draws follow the distribution they report, and never leave its support."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.sampler import Cut, Knobs, sample, stream_of, truncate, uniforms

torch.set_num_threads(1)

NUM_DRAWS = 4000
logit_rows = st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12)


def draws_of(logits: torch.Tensor, knobs: Knobs, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens at positions 0, 1, … of one seed, and their log-probs."""
    positions = np.arange(NUM_DRAWS)
    u = uniforms(np.full(NUM_DRAWS, stream_of(seed)), positions)
    drawn = sample(logits.expand(NUM_DRAWS, -1), knobs, torch.from_numpy(u))
    return drawn.token_ids, drawn.logprobs


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * NUM_DRAWS
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(logit_rows, st.integers(-(2**63), 2**64 - 1))
def test_the_frequencies_of_one_seed_follow_the_softmax(row: list[float], seed: int):
    logits = torch.tensor([row])
    tokens, _ = draws_of(logits, Knobs(), seed)
    counts = torch.bincount(tokens, minlength=len(row)).double()
    # The statistic has V − 1 degrees of freedom: mean V − 1, standard deviation √(2(V − 1)); 6 of these is < 1e-5.
    freedom = len(row) - 1
    assert chi_square(counts, torch.softmax(logits.double(), -1)[0]) < freedom + 6 * (2 * freedom) ** 0.5 + 6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(logit_rows, st.floats(0.05, 1.0), st.integers(1, 12), st.integers(0, 1000))
def test_truncated_draws_stay_within_a_support_that_sums_to_one(row: list[float], top_p: float, k: int, seed: int):
    logits, top_k = torch.tensor([row]), min(k, len(row))
    p, n = torch.tensor([top_p]), torch.tensor([top_k])
    kept, mass = truncate(torch.log_softmax(logits, -1), p, n, top_k)
    support = kept[0] > -torch.inf
    assert 1 <= int(support.sum()) <= top_k
    assert abs(float(kept.exp().sum()) - 1) < 1e-5
    assert abs(float(torch.softmax(logits, -1)[0][support].sum()) - float(mass)) < 1e-5
    cut = Cut(torch.arange(NUM_DRAWS), p.expand(NUM_DRAWS), n.expand(NUM_DRAWS), top_k)
    tokens, logprobs = draws_of(logits, Knobs(cut=cut), seed)
    assert bool(support[tokens].all())
    torch.testing.assert_close(logprobs, kept[0][tokens])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 8))
def test_streams_positions_and_draws_look_independent(seed: int, start: int, m: int):
    u = uniforms(np.full(2000, stream_of(seed)), np.arange(start, start + 2000), m)
    assert abs(u.mean() - 0.5) < 0.03
    lagged = np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]
    across = np.corrcoef(u[:, 0], u[:, 1])[0, 1]
    assert abs(lagged) < 0.15 and abs(across) < 0.15
