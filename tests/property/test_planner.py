"""The simulator keeps the laws of the runtime, and agrees with closed forms where there are any."""

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("simpy")
pytest.importorskip("scipy")

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts, ToolCosts
from headway.planner.lengths import Constant, LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import Simulation, simulate

DETERMINISTIC = Setup(
    groups_per_step=4,
    group_size=4,
    max_staleness=0,
    lengths=Constant(10),
    engine=EngineCosts(step_s=0.01, sequence_s=0.001),
    learner=LearnerCosts(token_s=0.002, step_s=0.05),
    num_slots=16,
    sync=SyncCosts(publish_s=0.02, transfer_s=0.03),
)


@st.composite
def setups(draw) -> Setup:
    return Setup(
        groups_per_step=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 4)),
        over_bound=draw(st.sampled_from(["wait", "drop", "mask"])),
        lengths=LogNormal(mean=8, cv=draw(st.sampled_from([0.0, 1.0, 2.0])), limit=60),
        engine=EngineCosts(0.01, 0.001, draw(st.sampled_from([0.0, 1e-4])), draw(st.sampled_from([0.0, 1e-3]))),
        learner=LearnerCosts(token_s=draw(st.sampled_from([1e-5, 1e-3, 1e-2]))),
        num_engines=draw(st.integers(1, 3)),
        num_slots=draw(st.integers(1, 6)),
        on_update=draw(st.sampled_from(["keep", "recompute", "interrupt"])),
        prompt_tokens=5,
        sync=SyncCosts(
            publish_s=0.01,
            transfer_s=draw(st.sampled_from([0.0, 0.3])),
            pause_s=draw(st.sampled_from([0.0, 0.1])),
            spread_s=draw(st.sampled_from([0.0, 0.2, 3.0])),
        ),
        tool=ToolCosts(num_turns=draw(st.integers(1, 3)), latency_s=draw(st.sampled_from([0.0, 0.5]))),
        shared=SharedCosts(
            draw(st.sampled_from([1.0, 2.0])),
            1.5,
            draw(st.sampled_from([0.0, 0.01])),
            issue_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        ),
    )


@settings(max_examples=60, deadline=None)
@given(setup=setups(), seed=st.integers(0, 9))
def test_issued_is_trained_plus_dropped_plus_in_flight_and_no_token_breaks_the_bound(setup, seed):
    simulation = Simulation(setup, num_steps=8, seed=seed)
    simulation.run()
    found = simulation.accounts
    assert found.issued == found.trained + found.dropped + found.generating + found.ready
    assert found.trained == 8 * setup.groups_per_step
    assert found.generating + found.ready == simulation.admission.num_pending <= simulation.admission.capacity
    for step in simulation.tally.steps:
        assert all(0 <= age <= setup.max_staleness for age in step.token_staleness)
        assert step.num_tokens + step.num_masked_tokens == step.lengths_sum
    if setup.over_bound != "drop":
        assert found.dropped == 0
    if setup.over_bound != "mask":
        assert not any(step.num_masked_tokens for step in simulation.tally.steps)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("engine", "learner", "shared", "publish_s"),
    [
        (EngineCosts(0.008, 0.0), LearnerCosts(token_s=1e-4), SharedCosts(controller_s=1e9, standstill=1.0), 0.0),
        (EngineCosts(0.008, 0.0), LearnerCosts(token_s=1e-4), SharedCosts(controller_s=1e4), 0.0),
        (EngineCosts(1e-9, 0.0), LearnerCosts(token_s=1e9), SharedCosts(), 0.0),
        (EngineCosts(1e-9, 1e-9, 1e-12), LearnerCosts(token_s=1.0), SharedCosts(), 1e9),
    ],
)
def test_costs_that_no_clock_can_hold_beside_each_other_end_all_the_same(engine, learner, shared, publish_s):
    extreme = Setup(
        groups_per_step=16,
        group_size=8,
        max_staleness=2,
        lengths=LogNormal(mean=100, cv=1.0, limit=1000),
        engine=engine,
        learner=learner,
        num_slots=64,
        sync=SyncCosts(publish_s=publish_s),
        shared=shared,
    )
    assert simulate(extreme, num_steps=12).step_s > 0


def test_hundreds_of_groups_are_issued_by_a_controller_to_which_issuing_is_nothing():
    wide = Setup(
        groups_per_step=40,
        group_size=1,
        max_staleness=16,
        lengths=Constant(5),
        engine=EngineCosts(0.01, 0.001),
        learner=LearnerCosts(token_s=1e-3),
        num_slots=40,
        shared=SharedCosts(controller_s=1e-3, issue_share=0.0),
    )
    assert simulate(wide, num_steps=4).step_s > 0


def closed_form(setup: Setup) -> float:
    """Seconds of a synchronous step: rounds of decoding on the fullest engine, then train, publish and sync."""
    fullest = math.ceil(setup.groups_per_step / setup.num_engines) * setup.group_size
    tokens = setup.lengths.draw(None, 1, 1)[0, 0]  # type: ignore[arg-type]  # a constant draws nothing
    rounds = [setup.num_slots] * (fullest // setup.num_slots) + [fullest % setup.num_slots] * bool(
        fullest % setup.num_slots
    )
    decode = sum(tokens * setup.engine.decode_step(active) for active in rounds)
    train = setup.learner.train(setup.batch_size * (tokens + setup.prompt_tokens), 1)
    return decode + train + setup.sync.publish_s + setup.sync.transfer_s


@pytest.mark.parametrize(("num_engines", "num_slots"), [(1, 16), (1, 8), (1, 5), (1, 1), (2, 16), (2, 8)])
def test_bound_0_with_equal_lengths_takes_what_the_closed_form_says(num_engines, num_slots):
    setup = replace(DETERMINISTIC, num_slots=num_slots, num_engines=num_engines)
    found = simulate(setup, num_steps=6)
    assert found.step_s == pytest.approx(closed_form(setup), rel=1e-9)
    busy = found.step_s * (1 - found.learner_idle)
    assert busy == pytest.approx(setup.learner.train(160, 1) + 0.02, rel=1e-9)
    assert found.token_staleness == {0: 1.0}


def test_reading_the_cache_costs_what_the_sum_over_steps_says():
    setup = replace(
        DETERMINISTIC, engine=EngineCosts(0.01, 0.001, context_s=1e-4), prompt_tokens=7, sync=SyncCosts(), num_slots=16
    )
    decode = sum(0.01 + 16 * 0.001 + 1e-4 * 16 * (7 + t + 0.5) for t in range(10))
    expected = decode + setup.learner.train(16 * 17, 1)
    assert simulate(setup, num_steps=4).step_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("num_engines", "num_slots"), [(1, 16), (1, 8), (1, 5), (1, 2), (1, 1), (2, 16), (2, 4)])
def test_members_that_start_together_prefill_their_prompt_once(num_engines, num_slots):
    setup = replace(DETERMINISTIC, num_slots=num_slots, num_engines=num_engines, prompt_tokens=7)
    costly = replace(setup, engine=replace(setup.engine, prefill_s=2e-3))
    members = range(16 // num_engines)  # of whole groups of 4, in rounds as of `closed_form`
    rounds = [members[i : i + num_slots] for i in range(0, len(members), num_slots)]
    num_prompts = sum(len({member // 4 for member in together}) for together in rounds)
    assert simulate(costly, num_steps=6).step_s == pytest.approx(closed_form(setup) + num_prompts * 7 * 2e-3, rel=1e-9)


@pytest.mark.parametrize("num_slots", [16, 8])  # at once, or after a wait together with others of the group
def test_a_later_turn_prefills_all_that_was_said_and_shown_for_every_member(num_slots):
    tool = ToolCosts(num_turns=2, observation_tokens=3)
    setup = replace(DETERMINISTIC, prompt_tokens=7, tool=tool, num_slots=num_slots)
    costly = replace(setup, engine=replace(setup.engine, prefill_s=2e-3))
    prefilled = 4 * 7 + 16 * (7 + 5 + 3)
    assert simulate(costly, num_steps=6).step_s == pytest.approx(closed_form(setup) + prefilled * 2e-3, rel=1e-9)


@pytest.mark.parametrize("on_update", ["keep", "recompute", "interrupt"])
def test_at_bound_0_an_update_costs_its_pause_and_no_prefill_for_nothing_is_cached(on_update):
    setup = replace(DETERMINISTIC, on_update=on_update, engine=replace(DETERMINISTIC.engine, prefill_s=2e-3))
    paused = replace(setup, sync=replace(setup.sync, pause_s=0.04))
    assert simulate(paused, num_steps=6).step_s == pytest.approx(closed_form(setup) + 0.04, rel=1e-9)


@pytest.mark.parametrize("spread_s", [0.0, 1e-6])  # all at the same moment, or each engine at its own
@pytest.mark.parametrize(("on_update", "again"), [("keep", 0), ("recompute", 1), ("interrupt", 1)])
def test_an_update_in_flight_costs_its_pause_and_the_prefill_of_what_is_cached_unless_it_is_kept(
    on_update, again, spread_s
):
    """Engines decide the step: a round of all slots, in which the version trained on the round before arrives."""
    setup = replace(
        DETERMINISTIC,
        max_staleness=1,
        on_update=on_update,
        prompt_tokens=5,
        engine=replace(DETERMINISTIC.engine, prefill_s=1e-3),
        learner=LearnerCosts(1e-4),
        sync=SyncCosts(publish_s=0.02, transfer_s=0.03, pause_s=0.04, spread_s=spread_s),
    )
    prompts, decode_step = 4 * 5 * 1e-3, setup.engine.decode_step(16)
    arrives = setup.learner.train(16 * 15, 1) + 0.02 + 0.03
    cached = 16 * (5 + (arrives - prompts) / decode_step)
    found = simulate(setup, num_steps=6)
    assert found.step_s == pytest.approx(prompts + 10 * decode_step + 0.04 + again * cached * 1e-3, rel=1e-5)
    assert found.engine_idle == pytest.approx(0, abs=1e-9)


def test_a_version_is_published_when_the_last_one_has_been_loaded_everywhere():
    setup = replace(DETERMINISTIC, max_staleness=4, learner=LearnerCosts(1e-4), sync=SyncCosts(0.02, 0.5, 1.0))
    assert simulate(setup, num_steps=6).step_s == pytest.approx(0.02 + 0.5 + 1.0, rel=1e-9)


@pytest.mark.parametrize(("num_slots", "refills"), [(16, 1), (8, 2), (4, 4)])
def test_a_pass_that_prefills_costs_once_for_all_that_join_together(num_slots, refills):
    setup = replace(DETERMINISTIC, num_slots=num_slots)
    passes = replace(setup, engine=replace(setup.engine, refill_s=0.5))
    found = simulate(passes, num_steps=6)
    assert found.refills_per_step == refills  # equal lengths: whole rounds of slots end and join together
    assert found.step_s == pytest.approx(simulate(setup, num_steps=6).step_s + 0.5 * refills, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    token_s=st.sampled_from([1e-4, 2e-3, 1e-2]),
    transfer_s=st.sampled_from([0.0, 0.2]),
    num_slots=st.sampled_from([4, 16]),
    num_engines=st.integers(1, 3),
)
def test_with_equal_lengths_a_larger_bound_never_lowers_throughput(token_s, transfer_s, num_slots, num_engines):
    setup = replace(
        DETERMINISTIC,
        learner=LearnerCosts(token_s),
        sync=SyncCosts(0.01, transfer_s),
        num_slots=num_slots,
        num_engines=num_engines,
    )
    rates = [simulate(replace(setup, max_staleness=s), num_steps=24).samples_per_s for s in (0, 1, 2, 4)]
    assert all(b >= a * 0.999 for a, b in pairwise(rates))


def test_a_learner_that_is_slower_than_its_engines_decides_the_step_at_any_bound_above_0():
    setup = replace(DETERMINISTIC, learner=LearnerCosts(0.1), max_staleness=2)
    found = simulate(setup, num_steps=10)
    assert found.step_s == pytest.approx(0.1 * 160 + 0.02)
    assert found.learner_idle == pytest.approx(0)
    assert found.staleness_token_mean == pytest.approx(2)


def test_when_engines_are_the_bottleneck_data_is_fresh_and_the_learner_waits():
    setup = replace(DETERMINISTIC, learner=LearnerCosts(1e-6), sync=SyncCosts(), max_staleness=4)
    found = simulate(setup, num_steps=20)
    assert found.engine_idle < 0.01 and found.learner_idle > 0.9
    assert found.staleness_token_mean < 1


def test_two_engines_and_a_learner_are_slower_on_two_cores_and_as_fast_on_three():
    setup = replace(DETERMINISTIC, num_engines=2, max_staleness=4, learner=LearnerCosts(0.01))
    seconds = [simulate(replace(setup, shared=SharedCosts(num_cores=n)), num_steps=20).step_s for n in (0, 3, 2, 1)]
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]


def test_the_learner_loses_the_share_of_the_controllers_time_that_it_is_told():
    setup = replace(DETERMINISTIC, learner=LearnerCosts(0.01), max_staleness=2, max_ready_batches=1)
    found = [simulate(replace(setup, shared=SharedCosts(controller_s=1e-3, standstill=a))) for a in (0.0, 0.5, 1.0)]
    lost = [f.step_s - found[0].step_s for f in found]
    assert lost[2] == pytest.approx(1e-3 * setup.batch_size, rel=0.05)
    assert lost[1] == pytest.approx(lost[2] / 2, rel=0.05)


def test_where_engines_leave_no_core_free_the_learner_loses_all_of_the_controllers_time():
    # The engine takes 1.76 s for what the learner takes 1.92 s for, so it has work for that share of the time.
    setup = replace(DETERMINISTIC, learner=LearnerCosts(0.012), max_staleness=2, num_slots=1)
    few, many = (
        simulate(replace(setup, shared=SharedCosts(controller_s=1e-3, standstill=0.0, num_cores=n))).step_s
        for n in (2, 3)
    )
    assert few - many == pytest.approx(1.76 / 1.92 * 1e-3 * setup.batch_size, rel=0.1)


def test_steps_of_one_size_vary_as_told_and_take_as_long_in_the_mean():
    setup = replace(DETERMINISTIC, max_staleness=2, sync=SyncCosts(), learner=LearnerCosts(0.1, jitter=0.2))
    simulation = Simulation(setup, num_steps=600)
    simulation.run()
    seconds = np.diff([step.at_s for step in simulation.tally.steps])
    assert np.mean(seconds) == pytest.approx(0.1 * 160, rel=0.03)
    assert np.std(seconds) / np.mean(seconds) == pytest.approx(0.2, rel=0.1)


def test_a_learner_that_varies_waits_for_engines_that_are_as_fast_and_they_for_it():
    setup = replace(
        DETERMINISTIC, max_staleness=4, max_ready_batches=1, sync=SyncCosts(), learner=LearnerCosts(0.26 / 160)
    )
    steady, varied = (
        simulate(replace(setup, learner=replace(setup.learner, jitter=jitter)), num_steps=200) for jitter in (0.0, 0.3)
    )
    assert steady.step_s < varied.step_s
    assert varied.learner_idle > steady.learner_idle + 0.02


def test_drop_loses_long_answers_and_wait_does_not():
    setup = replace(
        DETERMINISTIC, lengths=LogNormal(20, 2.0, 400), max_staleness=1, learner=LearnerCosts(1e-4), num_slots=32
    )
    dropping = simulate(replace(setup, over_bound="drop"), num_steps=100)
    waiting = simulate(setup, num_steps=100)
    assert dropping.dropped_fraction > 0.01
    assert dropping.length_bias < waiting.length_bias
    assert waiting.dropped_fraction == 0


def test_an_update_in_flight_gives_one_response_tokens_of_two_versions():
    setup = replace(DETERMINISTIC, lengths=Constant(50), max_staleness=2, learner=LearnerCosts(1e-4), num_slots=4)
    simulation = Simulation(setup, num_steps=6)
    simulation.run()
    spread = sum((s.token_staleness for s in simulation.tally.steps), Counter())
    assert len(spread) > 1


def test_engines_that_take_versions_one_by_one_hold_several_at_a_time_and_the_learner_does_not_wait_for_the_last():
    setup = replace(DETERMINISTIC, max_staleness=3, num_engines=3, learner=LearnerCosts(1e-3))
    together = simulate(setup, num_steps=20)
    rolling = replace(setup, sync=replace(setup.sync, spread_s=4 * together.step_s, patience_s=0.0))
    simulation = Simulation(rolling, num_steps=20)
    simulation.run()
    assert len({engine.version for engine in simulation._fleet.engines}) > 1
    assert all(age <= 3 for step in simulation.tally.steps for age in step.token_staleness)
    assert simulate(rolling, num_steps=20).step_s < 2 * together.step_s


def test_the_same_seed_gives_the_same_run():
    setup = replace(DETERMINISTIC, lengths=LogNormal(20, 1.0, 200), max_staleness=2)
    assert simulate(setup, num_steps=5, seed=3) == simulate(setup, num_steps=5, seed=3)
    assert simulate(setup, num_steps=5, seed=3) != simulate(setup, num_steps=5, seed=4)


def test_a_fleet_of_ten_thousand_engines_is_simulated_in_seconds():
    fleet = replace(
        DETERMINISTIC,
        **{"groups_per_step": 8192, "group_size": 8, "max_staleness": 4, "num_engines": 10_000, "num_slots": 16},
        lengths=LogNormal(mean=4000, cv=1.0, limit=32_000),
        engine=EngineCosts(step_s=0.01, sequence_s=1e-4, prefill_s=1e-5),
        learner=LearnerCosts(token_s=2e-3, step_s=3.0),
        learner_devices=10_000,
    )
    begun = time.process_time()
    found = simulate(fleet)
    assert time.process_time() - begun < 30  # 2 to 4 on an idle core
    assert found.cohort > 1 and found.samples_per_s > 0
    assert sum(found.token_staleness.values()) == pytest.approx(1) and max(found.token_staleness) <= 4
