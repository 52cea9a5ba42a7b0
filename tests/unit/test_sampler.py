import math

import numpy as np
import pytest
import torch

from headway.engine.sampler import Cut, Knobs, draw, sample, stream_of, truncate, uniforms

torch.set_num_threads(1)

PROBS = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
LOGPROBS = PROBS.log()


def u(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def cut_to(top_p: float = 1.0, top_k: int = 4) -> tuple[list[float], float]:
    logprobs, mass = truncate(LOGPROBS, torch.tensor([top_p]), torch.tensor([top_k]), top_k)
    return logprobs[0].exp().tolist(), mass.item()


def test_the_stream_is_the_published_splitmix64():
    # First output of the reference generator for the seed 1234567.
    assert int(stream_of(1234567)) == 6457827717110365317


def test_seeds_are_taken_modulo_two_to_the_64():
    assert stream_of(-1) == stream_of(2**64 - 1)
    assert stream_of(3) == stream_of(3 + 2**64)
    assert stream_of(3) != stream_of(4)


def test_uniforms_depend_on_seed_position_and_draw_alone():
    streams = np.array([stream_of(1), stream_of(2)], np.uint64)
    both = uniforms(streams, np.array([5, 9]), 3)
    alone = uniforms(streams[1:], np.array([9]), 1)
    assert both.shape == (2, 4)
    assert both[1, :2].tolist() == alone[0].tolist()
    assert len(set(both.ravel().tolist())) == 8
    assert ((both >= 0) & (both < 1)).all()


@pytest.mark.parametrize(("value", "token"), [(0.0, 0), (0.4999, 0), (0.5, 1), (0.7499, 1), (0.75, 2), (0.99999, 3)])
def test_a_token_answers_to_its_share_of_the_unit_interval(value: float, token: int):
    assert draw(PROBS, u(value)).item() == token


def test_a_token_of_no_probability_is_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    assert draw(probs, u(0.0, 0.5, 1 - 2.0**-48)).tolist() == [[1, 3, 3]]


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept", "mass"),
    [
        (1.0, 4, [0.5, 0.25, 0.125, 0.125], 1.0),
        (1.0, 2, [2 / 3, 1 / 3, 0, 0], 0.75),
        (0.5, 4, [1, 0, 0, 0], 0.5),
        (0.51, 4, [2 / 3, 1 / 3, 0, 0], 0.75),
        (0.01, 4, [1, 0, 0, 0], 0.5),
        (0.6, 2, [1, 0, 0, 0], 0.5),  # 0.5 of the 0.75 that top_k left is a share of 2/3
    ],
)
def test_truncation_keeps_top_k_and_then_top_p_of_what_is_left(
    top_p: float, top_k: int, kept: list[float], mass: float
):
    found, found_mass = cut_to(top_p, top_k)
    assert found == pytest.approx(kept, abs=1e-6)
    assert found_mass == pytest.approx(mass, abs=1e-6)


def test_only_rows_that_ask_for_truncation_are_touched():
    logits = LOGPROBS.repeat(2, 1)
    cut = Cut(rows=torch.tensor([1]), top_p=torch.tensor([1.0]), top_k=torch.tensor([2]), max_k=2)
    drawn = sample(logits, Knobs(cut=cut), u(0.9).repeat(2, 1))
    assert drawn.token_ids.tolist() == [3, 1]
    assert drawn.kept_mass is not None and drawn.kept_mass.tolist() == pytest.approx([1.0, 0.75])
    assert drawn.logprobs.tolist() == pytest.approx([math.log(0.125), math.log(1 / 3)])
    assert drawn.entropy is not None
    two = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert drawn.entropy.tolist() == pytest.approx([1.75 * math.log(2), two])


def test_temperature_flattens_the_distribution_before_it_is_reported():
    drawn = sample(LOGPROBS, Knobs(temperature=torch.tensor([[2.0]])), u(0.0))
    roots = PROBS.sqrt() / PROBS.sqrt().sum()
    assert drawn.logprobs.item() == pytest.approx(roots[0, 0].log().item())


def test_greedy_rows_take_the_most_likely_token_and_report_the_plain_distribution():
    knobs = Knobs(greedy=torch.tensor([True, False]))
    drawn = sample(LOGPROBS.repeat(2, 1), knobs, u(0.9).repeat(2, 1))
    assert drawn.token_ids.tolist() == [0, 3]
    assert drawn.logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.125)])


def test_extra_draws_and_most_likely_tokens_carry_their_logprobs():
    drawn = sample(LOGPROBS, Knobs(num_draws=2, num_top=2), u(0.0, 0.6, 0.99))
    assert drawn.draw_ids is not None and drawn.draw_ids.tolist() == [[1, 3]]
    assert drawn.draw_logprobs is not None
    assert drawn.draw_logprobs.tolist()[0] == pytest.approx([math.log(0.25), math.log(0.125)])
    assert drawn.top_ids is not None and drawn.top_ids.tolist() == [[0, 1]]
    assert drawn.top_logprobs is not None
    assert drawn.top_logprobs.tolist()[0] == pytest.approx([math.log(0.5), math.log(0.25)])
