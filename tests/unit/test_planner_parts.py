"""Lengths, fits and search of the planner."""

import math
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("simpy")
pytest.importorskip("scipy")

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import ConfigError, RunConfig, load_config
from headway.planner.costs import EngineCosts, LearnerCosts, fit_line
from headway.planner.extra import ExtraMissing, require_extra
from headway.planner.lengths import Constant, Empirical, LogNormal
from headway.planner.search import best_split, golden_maximum, recommend
from headway.planner.setup import Setup
from headway.planner.simulate import simulate
from headway.runtime.observed import CostsUnknown
from headway.runtime.planning import Plan, build_setup, left_out, plan, render

COSTS = """
prompt_tokens = 10
[lengths]
mean = 50
cv = 0.8
limit = 400
[engine]
step_s = 0.01
sequence_s = 0.0002
[learner]
token_s = 0.002
"""


def test_log_normal_lengths_have_the_mean_and_the_correlation_that_was_asked_for():
    lengths = LogNormal(mean=200, cv=0.5, limit=100_000, correlation=0.6).draw(np.random.default_rng(0), 20_000, 2)
    assert lengths.mean() == pytest.approx(200, rel=0.02)
    assert lengths.std() == pytest.approx(100, rel=0.05)
    assert np.corrcoef(np.log(lengths).T)[0, 1] == pytest.approx(0.6, abs=0.03)


def test_empirical_lengths_keep_groups_together():
    observed = np.array([[1, 1], [9, 9]])
    drawn = Empirical(observed).draw(np.random.default_rng(0), 100, 2)
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert Empirical(observed).draw(np.random.default_rng(0), 5, 4).shape == (5, 4)


@pytest.mark.parametrize("wrong", [lambda: Constant(0), lambda: LogNormal(0, 1, 9), lambda: EngineCosts(0, 0)])
def test_a_workload_without_time_or_tokens_is_refused(wrong):
    with pytest.raises(ValueError):
        wrong()


@pytest.mark.parametrize("wrong", [-1.0, 1e300, math.inf, math.nan])
def test_a_cost_that_no_clock_can_keep_is_refused_by_name(wrong: float):
    with pytest.raises(ValueError, match="step_s must be from 0 to 1e"):
        EngineCosts(wrong, 0.1)


def test_a_line_is_found_again_and_never_goes_below_zero():
    x = [1.0, 8.0, 16.0, 64.0]
    intercept, slope = fit_line(x, [0.02 + 0.0005 * v for v in x], [1.0] * 4)
    assert (intercept, slope) == (pytest.approx(0.02), pytest.approx(0.0005))
    assert fit_line(x, [1.0 - 0.001 * v for v in x], [1.0] * 4)[1] == 0


@settings(max_examples=200, deadline=None)
@given(peak=st.integers(1, 80), high=st.integers(1, 80))
def test_golden_section_finds_the_peak_of_any_tent(peak, high):
    assert golden_maximum(lambda n: -abs(n - peak), 1, high) == min(peak, high)


def test_the_best_split_of_a_deterministic_load_balances_both_sides():
    """Engines sample 1/(10·0.001·n) responses each, the learner trains one in 0.1 s per device: equal at 16 + 16."""
    setup = Setup(
        groups_per_step=64,
        group_size=1,
        max_staleness=4,
        lengths=Constant(10),
        engine=EngineCosts(step_s=0.0, sequence_s=0.01),
        learner=LearnerCosts(token_s=0.01),
        num_slots=8,
    )
    best = best_split(setup, num_devices=32)
    assert abs(best.num_engines - 16) <= 1


def test_a_bound_that_buys_nothing_is_not_recommended():
    config = RunConfig(batch_size=32, group_size=4)
    fast = {"lengths": Constant(5), "engine": EngineCosts(0.001, 0), "learner": LearnerCosts(0.1)}
    from headway.planner.search import Option

    setups = [Setup(config.groups_per_step, 4, s, **fast) for s in (1, 2, 4)]
    assert recommend([Option("", s, simulate(s, num_steps=8)) for s in setups]).setup.max_staleness == 1


def test_a_plan_from_a_costs_file_compares_with_synchronous_and_searches(tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text(COSTS)
    config = RunConfig(batch_size=32, group_size=4, max_staleness=2)
    found = plan(config, runs=[], costs=file, num_devices=6, devices_per_engine=1, bounds=(0, 2))
    names = [option["name"] for option in found.to_dict()["options"]]
    assert names == ["as configured", "synchronous", "synchronous, colocated", "best at bound 0", "best at bound 2"]
    assert found.recommended is not None
    assert found.speedups(found.options[0])[0] >= 1
    screen = StringIO()
    Console(width=80, file=screen).print(render(found))
    shown = screen.getvalue()
    assert "…" not in shown and all(word in shown for name in names for word in name.split())
    caption = " ".join(shown.split())
    assert "engines to take 10% less or more time" in caption
    assert ("the largest that was tried" in caption) == (found.recommended.setup.max_staleness == 2)


def test_a_recommended_bound_at_the_edge_of_the_search_is_called_that(tmp_path):
    def caption(bounds: tuple[int, ...]) -> str:
        file, screen = tmp_path / "costs.toml", StringIO()
        file.write_text(COSTS.replace("token_s = 0.002", "token_s = 0\nstep_s = 100"))  # engines take next to none
        config = RunConfig(batch_size=32, group_size=4, max_staleness=0)
        found = plan(config, runs=[], costs=file, num_devices=6, devices_per_engine=1, bounds=bounds)
        assert found.recommended is not None and found.recommended.setup.max_staleness == bounds[0]
        Console(width=120, file=screen).print(render(found))
        return " ".join(screen.getvalue().split())

    assert "the largest that was tried" in caption((1,))
    assert "the largest that was tried" not in caption((1, 4))


def test_a_plan_says_where_a_small_error_in_one_side_decides_how_old_data_are(tmp_path):
    def planned(learner_s: float) -> Plan:
        file = tmp_path / "costs.toml"
        file.write_text(COSTS.replace("token_s = 0.002", f"token_s = 0\nstep_s = {learner_s}"))
        config = load_config(None, ["batch_size=32", "group_size=4", "max_staleness=4", "engines.num_slots=8"])
        return plan(config, runs=[], costs=file, num_devices=None, devices_per_engine=1)

    def width(learner_s: float) -> float:
        faster, slower = planned(learner_s).spread
        assert faster.samples_per_s >= 0.99 * slower.samples_per_s
        return faster.staleness_token_mean - slower.staleness_token_mean

    equally_fast = planned(1e-6).options[0].forecast.step_s
    assert width(equally_fast) > 2 * max(width(equally_fast / 4), width(4 * equally_fast))


def test_a_plan_names_what_it_does_not_simulate():
    sets = [
        "exact_lag=true",
        "evaluation.every=5",
        "algorithm=tis",
        "proximal=exact_snapshot",
        "distill.teacher=tiny:0.4m",
    ]
    assert left_out(load_config(None, sets[:4])) == ["exact_lag", "evaluation.every", "proximal = exact_snapshot"]
    assert "distill.teacher" in left_out(load_config(None, sets[4:]))
    assert left_out(load_config(None, ["evaluation.every=0"])) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (COSTS.replace("[engine]", "[engines]"), "unknown key 'engines'; did you mean 'engine'"),
        (COSTS.replace("step_s", "steps_s"), "unknown key engine.steps_s; did you mean 'step_s'"),
        (COSTS.replace("mean = 50", "mean = 0"), "lengths: needs finite mean"),
        (COSTS.replace("mean = 50", "mean = inf"), "lengths: needs finite mean"),
        (COSTS.replace("[learner]", "[learner]\njitter = 1e300"), "learner: jitter must be from 0 to 1e"),
        (COSTS.replace("[lengths]", "lengths = 5\n[others]"), "lengths must be a table"),
        (COSTS.replace("= 10", '= "a"'), "prompt_tokens must be a whole number of at least 0, got 'a'"),
        ("learner_devices = 0\n" + COSTS, "learner_devices must be a whole number of at least 1, got 0"),
        (COSTS + "[tool]\nnum_turns = 1.5", "tool.num_turns must be a whole number, got 1.5"),
        (COSTS.replace("limit = 400", "limit = 400.5"), "lengths.limit must be a whole number"),
        (COSTS.replace("mean = 50", "kind = []"), "lengths.kind"),
        ("prompt_tokens = 3", "nothing says what lengths, engine, learner are like: give --run"),
    ],
)
def test_a_wrong_costs_file_is_refused_by_name(tmp_path, text, complaint):
    file = tmp_path / "costs.toml"
    file.write_text(text)
    with pytest.raises((ConfigError, CostsUnknown), match=complaint.replace("[", r"\[")):
        build_setup(RunConfig(), runs=[], costs=file)


def test_a_missing_extra_is_named_with_its_mend():
    with pytest.raises(ExtraMissing, match=r"needs no_such_library: pip install 'headway\[planner\]'"):
        require_extra("planner", "simpy", "no_such_library")


def test_a_large_fleet_is_simulated_by_cohorts_that_agree_with_the_whole():
    whole = Setup(
        groups_per_step=128,
        group_size=8,
        max_staleness=2,
        lengths=LogNormal(40, 0.8, 200),
        engine=EngineCosts(0.01, 0.0002),
        learner=LearnerCosts(token_s=0.002),
        num_engines=32,
        num_slots=32,
        learner_devices=32,
    )
    exact = simulate(whole, num_steps=6)
    shrunk = simulate(whole, num_steps=12, cohort_responses=256)
    assert (exact.cohort, shrunk.cohort) == (1, 4)
    assert shrunk.samples_per_s == pytest.approx(exact.samples_per_s, rel=0.05)
    assert shrunk.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=0.05)
