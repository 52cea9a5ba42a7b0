"""Costs fitted to what runs show.

A run with `max_staleness = 0` shows what engine and learner cost alone, an asynchronous one beside it what they cost
each other. Of asynchronous runs alone the costs are as they were in them: what the sides cost each other is part of
those, and is not counted again. The slowdowns, which no metric shows, are fitted by simulating the very runs that were
observed.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from headway.config import RunConfig
from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts, ToolCosts, fit_costs, fit_line
from headway.planner.forecast import Forecast, summarize
from headway.planner.lengths import Empirical
from headway.planner.setup import Setup
from headway.planner.simulate import Simulation
from headway.runtime.devices import pick_device
from headway.runtime.observed import CostsUnknown, Observed, end_observed, first_observed

_NUM_FITTED = 60
"""Steps of a run that are simulated, again and again, when costs are fitted."""

_NUM_ROUNDS, _MOST_SLOWED = 20, 20.0
"""Simulations that a fit of slowdowns may take, and the largest one: more would be a standstill."""

_FEWEST_STEPS = 10
"""Steps from which three costs are fitted."""

_MOST_MISFIT = 0.25
"""Share by which the closest fit may miss the seconds of training, or of a decode step."""


Decoding = tuple[float, float, float]
"""Of one record: mean active sequences, seconds of a decode step, decode steps."""


def shape_of(config: RunConfig) -> dict[str, Any]:
    """What a configuration says of a Setup."""
    return {
        "groups_per_step": config.groups_per_step,
        "group_size": config.group_size,
        "max_staleness": config.max_staleness,
        "over_bound": config.over_bound,
        "max_ready_batches": config.rollout.max_ready_batches or None,
        "num_engines": config.engines.num_engines,
        "num_slots": config.engines.num_slots,
        "learner_devices": config.learner.num_ranks,
        "on_update": config.engines.on_update,
    }


def learn(runs: Sequence[Observed], *, config: RunConfig) -> Setup:
    """The setup of `config` with costs and lengths of these runs, which should differ from it in few things."""
    together = [run for run in runs if run.config.max_staleness > 0]
    alone = [run for run in runs if run.config.max_staleness == 0] or together
    engine, learner = _engine(alone), _learner(alone)
    steps = [s for run in runs for s in run.steps]
    widths = [run.lengths.shape[1] for run in runs]
    num_members = config.group_size if config.group_size in widths else widths[0]
    setup = Setup(
        **shape_of(config),
        lengths=Empirical(np.concatenate([run.lengths for run in runs if run.lengths.shape[1] == num_members])),
        engine=engine,
        learner=learner,
        prompt_tokens=round(fmean(_prompt_tokens(run, s) for run in runs for s in run.steps)),
        sync=SyncCosts(publish_s=_publish(alone), transfer_s=_transfer(alone)),
        tool=ToolCosts(num_turns=max(1, round(fmean(s["turns"] for s in steps))), latency_s=config.task.latency_s),
        shared=_shared(alone, config),
    )
    if together and alone is not together:
        # At work, engines take a version later, and more responses share what the controller does anyway.
        at_work = replace(
            setup,
            sync=replace(setup.sync, transfer_s=_transfer(together)),
            shared=replace(setup.shared, controller_s=_controller(together), issue_share=_issue_share(together)),
        )
        shared = _slowdowns(at_work, together)
        asked = at_work if config.max_staleness else setup
        setup = replace(asked, shared=replace(shared, controller_s=asked.shared.controller_s))
    return setup


def _engine(runs: Sequence[Observed]) -> EngineCosts:
    """Decode steps are timed where no request joined; what engines were busy beyond goes to the passes that prefill.

    Those carry the tokens of prompts and what is read and said between steps, too, and with `on_update = "recompute"`
    what is computed again: no metric tells them apart.
    """
    decoded = [d for run in runs for d in _decoded(run)]
    plain = [d for run in runs for d in _plain(run)]
    step_s, sequence_s = fit_line(*zip(*(plain or decoded), strict=True))
    costs = EngineCosts(step_s=step_s, sequence_s=sequence_s)
    num_refills = sum(s["num_refills"] for run in runs for s in run.steps)
    left_s = sum(num * (seconds - costs.decode_step(active)) for active, seconds, num in decoded)
    return replace(costs, refill_s=max(0.0, left_s / num_refills)) if plain and num_refills else costs


def _plain(run: Observed) -> list[Decoding]:
    """Of steps that no request joined."""
    timed = [s for s in run.steps if s["num_decode_steps"]]
    return [(s["decode_active"], s["decode_step_s"] / _crowding(run, s), s["num_decode_steps"]) for s in timed]


def _decoded(run: Observed) -> list[Decoding]:
    return [_alone(run, s) for s in run.steps if s["mean_active"]]


def _alone(run: Observed, step: dict[str, Any]) -> Decoding:
    active, seconds, num = _decoding(run, step)
    return active, seconds / _crowding(run, step), num


def _crowding(run: Observed, step: dict[str, Any]) -> float:
    """How many times longer than one alone the engines of a synchronous run took: the learner waits meanwhile."""
    if run.config.max_staleness or not step["learner_idle"]:
        return 1.0
    num_engines = run.config.engines.num_engines
    num_busy = min(num_engines, num_engines * (1 - step["engine_idle"]) / step["learner_idle"])
    return SharedCosts(num_cores=_num_cores(run.config)).crowding(num_busy)


def _decoding(run: Observed, step: dict[str, Any]) -> Decoding:
    tokens = step["sampled_tokens_per_s"] * step["step_s"]
    decode_steps = tokens / step["mean_active"]
    busy_s = (1 - step["engine_idle"]) * step["step_s"] * run.config.engines.num_engines
    return step["mean_active"], busy_s / decode_steps, decode_steps


def _learner(runs: Sequence[Observed]) -> LearnerCosts:
    tokens = [_trained(s) / run.config.learner.num_ranks for run in runs for s in run.steps]  # of one device
    seconds = [s["train_s"] for run in runs for s in run.steps]
    if np.std(tokens) < 0.1 * np.mean(tokens):
        # Steps of one size cannot tell a fixed part from one per token; most of it is per token.
        fitted = LearnerCosts(token_s=sum(seconds) / sum(tokens))
    else:
        step_s, token_s = fit_line(tokens, seconds, [1.0] * len(tokens))
        fitted = LearnerCosts(step_s=step_s, token_s=token_s)
    return replace(fitted, jitter=fmean(_jitter(run, fitted) for run in runs))


def _jitter(run: Observed, fitted: LearnerCosts) -> float:
    """Of one run, and blind to the few steps in which the machine was somewhere else: half of what two thirds span."""
    num_ranks = run.config.learner.num_ranks
    logs = [math.log(s["train_s"] / fitted.train(_trained(s), num_ranks)) for s in run.steps]
    low, high = np.quantile(logs, (1 / 6, 5 / 6))
    return float(high - low) / 2


def _trained(step: dict[str, Any]) -> float:
    """Tokens, prompts included."""
    return step["trained_tokens_per_s"] * step["train_s"]


def _publish(runs: Sequence[Observed]) -> float:
    """What a step takes besides waiting and training: publish, records, the controller's work in between."""
    return max(0.0, fmean((1 - s["learner_idle"]) * s["step_s"] - s["train_s"] for run in runs for s in run.steps))


def _transfer(runs: Sequence[Observed]) -> float:
    return median(s["publish_lag_s"] for run in runs for s in run.steps)


def _prompt_tokens(run: Observed, step: dict[str, Any]) -> float:
    return max(0.0, _trained(step) - step["num_tokens"] - step["num_masked_tokens"]) / run.config.batch_size


def imitate(setup: Setup, run: Observed, *, num_steps: int | None = None, seed: int = 0) -> Forecast:
    """The observed steps, the first `num_steps` of them, simulated with these costs in the shape of that run."""
    config = run.config
    own = replace(
        setup,
        **shape_of(config),
        tool=replace(setup.tool, latency_s=config.task.latency_s),
    )
    warmup, last = first_observed(config), end_observed(config)
    simulation = Simulation(
        own,
        num_steps=last if num_steps is None else min(last, warmup + num_steps),
        seed=seed,
        total_groups=config.num_steps * config.groups_per_step,
    )
    simulation.run()
    return summarize(simulation.tally, simulation.accounts, setup=own, simulated=own, warmup=warmup)


def _shared(runs: Sequence[Observed], config: RunConfig) -> SharedCosts:
    """Of asynchronous runs alone the controller's time per response only: the rest is in their other costs already."""
    if all(run.config.max_staleness for run in runs):
        return SharedCosts(controller_s=_controller(runs), issue_share=_issue_share(runs), standstill=0.0)
    return SharedCosts(controller_s=_controller(runs), num_cores=_num_cores(config))


def _controller(runs: Sequence[Observed]) -> float:
    """Its seconds of work per response."""
    return sum(s["controller_s"] for run in runs for s in run.steps) / sum(
        run.config.batch_size * len(run.steps) for run in runs
    )


def _issue_share(runs: Sequence[Observed]) -> float:
    """Share of its work on responses that the controller does at issue: least squares over steps that issue unevenly.

    A step's own work is a third cost, and no part of it. Where steps start what they finish, as at bound 0, or are few,
    nothing tells the shares apart: half.
    """
    steps = [s for run in runs for s in run.steps]
    amounts = np.array([(s["num_started"], s["num_finished"], 1) for s in steps], float)
    if len(steps) < _FEWEST_STEPS or np.std(amounts[:, 0] - amounts[:, 1]) < 0.1 * np.mean(amounts[:, 0]):
        return SharedCosts().issue_share
    issue_s, end_s, _ = fit_costs(amounts, np.array([s["controller_s"] for s in steps]))
    return issue_s / (issue_s + end_s) if issue_s + end_s else SharedCosts().issue_share


def _num_cores(config: RunConfig) -> int:
    """Those of this machine, where its processors are what engines and learner compute with."""
    on_cpu = {pick_device(config.engines.device), pick_device(config.learner.device)} == {"cpu"}
    if not on_cpu or config.engine != "torch" or config.runtime != "local":
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _slowdowns(setup: Setup, runs: Sequence[Observed]) -> SharedCosts:
    """What either side costs the other while both work, so that simulations of these asynchronous runs agree with them.

    Slowdowns are multiplied by observed ÷ simulated seconds until these agree. Raises CostsUnknown when they never do.
    """
    setup = replace(setup, learner=replace(setup.learner, jitter=0.0))  # means are fitted
    shared, closest, misfit = setup.shared, setup.shared, math.inf
    for _ in range(_NUM_ROUNDS):
        found = [imitate(replace(setup, shared=shared), run, num_steps=_NUM_FITTED) for run in runs]
        pairs = list(zip(runs, found, strict=True))
        train = fmean(_train_s(run) / _simulated_train_s(f, setup) for run, f in pairs)
        decode = fmean(_decode_step_s(run) / _simulated_decode_step_s(f, run) for run, f in pairs)
        if max(abs(train - 1), abs(decode - 1)) < misfit:
            closest, misfit = shared, max(abs(train - 1), abs(decode - 1))
        if misfit < 0.002:
            break
        shared = replace(
            shared,
            engine_slowdown=_limited(shared.engine_slowdown * decode),
            learner_slowdown=_limited(shared.learner_slowdown * train),
        )
    if misfit > _MOST_MISFIT:
        raise CostsUnknown(
            f"beside each other, training and decoding take {misfit:.0%} more or less than these runs' costs explain; "
            "give runs of one model on one idle machine that differ in max_staleness alone and have fifty steps or more"
        )
    return closest


def _limited(slowdown: float) -> float:
    return min(_MOST_SLOWED, max(1.0, slowdown))


def _train_s(run: Observed) -> float:
    return fmean(s["train_s"] for s in run.steps)


def _simulated_train_s(forecast: Forecast, setup: Setup) -> float:
    return (1 - forecast.learner_idle) * forecast.step_s - setup.sync.publish_s


def _decode_step_s(run: Observed) -> float:
    """Seconds of a decode step."""
    _, seconds, num = zip(*(_decoding(run, s) for s in run.steps if s["mean_active"]), strict=True)
    return float(np.average(seconds, weights=num))


def _simulated_decode_step_s(forecast: Forecast, run: Observed) -> float:
    busy = (1 - forecast.engine_idle) * run.config.engines.num_engines
    return busy * forecast.mean_active / forecast.sampled_tokens_per_s
