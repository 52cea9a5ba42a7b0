"""The law is found again where the data hold it, and says so where they do not."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planner.law import Cell, Interval, Law, NotIdentified, classify, fit

A, B, STEPS = 2e-3, 0.1, 60


def grid(a: float, b: float, *, bounds=(0, 1, 2, 4, 8, 16), steps=STEPS, noise: float = 0.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    cells = []
    for bound in bounds:
        border = min(a / bound if bound else math.inf, b / steps)
        for lr in np.geomspace(3e-5, 3e-3, 9):
            odds = 12 * math.log(lr / border)
            collapsed = rng.random() < 1 / (1 + math.exp(-odds)) if noise else lr > border
            cells.append(Cell(bound, float(lr), steps, bool(collapsed)))
    return cells


def test_both_constants_are_found_within_their_intervals_and_the_spacing_of_the_grid():
    law = fit(grid(A, B))
    spacing = 100 ** (1 / 8)
    for interval, true in ((law.a, A), (law.b, B)):
        assert interval.low is not None and interval.high is not None
        assert interval.low <= true <= interval.high
        assert true / spacing <= interval.estimate <= true * spacing
    assert law.staleness_matters > 3.84 and law.horizon_matters > 3.84
    assert (law.binding(16, STEPS), law.binding(0, STEPS)) == ("staleness", "horizon")


@pytest.mark.parametrize("true", [0.0, 0.5, 1.0])
def test_a_border_that_falls_more_slowly_than_the_law_says_is_found_out(true):
    bounds, rates = (0, 2, 8, 32), np.geomspace(1e-5, 1e-2, 25)
    borders = {bound: 4e-4 * (2 / bound) ** true if bound else B / STEPS for bound in bounds}
    law = fit([Cell(bound, float(lr), STEPS, bool(lr > borders[bound])) for bound in bounds for lr in rates])
    assert law.exponent is not None and law.exponent.estimate == pytest.approx(true, abs=0.2)
    assert (law.exponent_differs > 3.84) == (true < 1)


def test_the_constraint_that_is_named_is_the_one_whose_lower_end_is_recommended():
    a, b = Interval(0.262, 0.000171, None), Interval(0.104, 0.00456, None)
    law = Law(a, b, 2.0, 0.95, 0.0, 0.0, (Cell(4, 1e-4, 8, False),))
    assert law.recommend(4, 8) == pytest.approx(0.000171 / 4) and law.binding(4, 8) == "staleness"
    assert any("do not support the constraint that binds, staleness" in doubt for doubt in law.doubts(4, 8))
    with pytest.raises(NotIdentified, match="no bound above 0"):
        replace(law, cells=(Cell(0, 1e-4, 8, False),)).recommend(4, 8)


@pytest.mark.parametrize("true", [0.0, 0.5, 1.0])
def test_a_border_that_falls_more_slowly_with_the_horizon_than_the_law_says_is_found_out(true):
    lengths, rates = (24, 96, 384), np.geomspace(1e-5, 1e-2, 25)
    borders = {length: 1e-3 * (96 / length) ** true for length in lengths}
    law = fit([Cell(0, float(lr), length, bool(lr > borders[length])) for length in lengths for lr in rates])
    assert law.horizon_exponent is not None and law.horizon_exponent.estimate == pytest.approx(true, abs=0.2)
    assert (law.horizon_exponent_differs > 3.84) == (true < 1)
    doubts = law.doubts(0, 96)
    assert [("rejects the law's 1/T" in doubt and "below the swept lengths" in doubt) for doubt in doubts] == [True] * (
        true < 1
    )


def test_one_bound_and_one_length_say_nothing_of_the_exponents():
    law = fit(grid(A, B, bounds=(0, 4)))
    assert law.exponent is None and law.horizon_exponent is None


@pytest.mark.parametrize("seed", range(4))
def test_noisy_borders_are_covered(seed):
    law = fit(grid(A, B, noise=1.0, seed=seed))
    assert law.a.low is not None and law.a.high is not None
    assert law.a.low / 1.3 <= A <= law.a.high * 1.3


def test_where_staleness_never_binds_the_data_do_not_support_it():
    law = fit(grid(1.0, B, bounds=(0, 1, 2, 4)))
    assert law.a.high is None
    assert law.staleness_matters < 3.84 < law.horizon_matters
    # The cautious end of what is hardly known is what a recommendation takes, and says.
    assert law.binding(4, STEPS) == "staleness"
    assert "do not support the constraint that binds, staleness" in law.doubts(4, STEPS)[0]


def test_where_only_staleness_binds_the_horizon_is_open():
    law = fit(grid(A, 50.0, bounds=(2, 4, 8)))
    assert law.b.high is None and law.horizon_matters < 3.84


@settings(max_examples=30, deadline=None)
@given(bound=st.integers(0, 64), steps=st.integers(1, 1000))
def test_the_rate_falls_with_bound_and_horizon_and_never_exceeds_the_estimate(bound, steps):
    law = Law.from_dict(json.loads(json.dumps(LAW.to_dict())))
    assert law == LAW
    assert law.recommend(bound, steps) <= law.max_lr(bound, steps)
    assert law.max_lr(bound + 1, steps) <= law.max_lr(bound, steps)
    assert law.max_lr(bound, steps + 1) <= law.max_lr(bound, steps)


LAW = fit(grid(A, B))


def test_a_sweep_without_a_border_is_refused_with_the_mend():
    with pytest.raises(NotIdentified, match=r"stayed stable.*larger"):
        fit([Cell(1, 1e-4, 10, False)])
    with pytest.raises(NotIdentified, match=r"collapsed.*smaller"):
        fit([Cell(1, 1e-4, 10, True)])


def test_an_open_lower_end_is_never_recommended_from():
    law = fit([Cell(4, 1e-4, 60, True), Cell(0, 1e-4, 60, False), Cell(0, 1e-2, 60, True)])
    assert law.a.low is None
    with pytest.raises(NotIdentified, match="smaller learning rates"):
        law.recommend(4, 60)


RISING = list(np.linspace(0.2, 0.8, 60))


@pytest.mark.parametrize(
    ("rewards", "scores", "finished", "at"),
    [
        (RISING, {}, True, None),
        ([0.5] * 60, {}, True, None),
        (RISING[:30] + [0.0] * 30, {}, True, 33),
        (RISING[:30] + [0.0] * 8 + RISING[38:], {}, True, None),
        (RISING[:20], {}, False, 20),
        ([], {}, False, 0),
        ([], {}, True, None),
        # Stale rewards say nothing yet of a policy that is already lost.
        (RISING, {0: 0.6, 20: 0.7, 40: 0.3, 60: 0.1}, True, 40),
        (RISING, {0: 0.6, 20: 0.1, 60: 0.5}, True, None),
        (RISING[:30] + [0.0] * 30, {0: 0.6, 20: 0.1, 60: 0.1}, True, 20),
        # Penalties that shrink: the run learns.
        ([reward - 1 for reward in RISING], {}, True, None),
    ],
)
def test_the_rule_of_collapse(rewards, scores, finished, at):
    found = classify(rewards, scores, Cell(1, 1e-3, 60, False), finished=finished)
    assert (found.collapsed, found.collapsed_at) == (at is not None, at)
