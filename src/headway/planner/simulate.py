"""A run as a discrete-event simulation: the runtime's own `Admission`, with engines and learner that only take time.

What is as in the runtime: groups are issued in order of id, whenever `may_issue` says so at the version of the least
loaded engine for which it does; members keep to one engine unless they would queue there beside a free slot elsewhere;
a whole group becomes ready with its real oldest version; the learner takes `next_batch` at the version it will train;
publish waits for the last sync; tokens carry the version that sampled them. The controller is serial and does one thing
at a time. What is left out: an exact lag, evaluations, checkpoints, faults, teacher and proximal sources, and the
differences between engines of one kind.
"""

import math
from collections.abc import Callable, Generator, Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import simpy

from headway.planner.engine import Request, SimulatedEngine
from headway.planner.fleet import Fleet
from headway.planner.forecast import Accounts, Forecast, StepRecord, Tally, count_ages, summarize
from headway.planner.group import Group, turn_tokens
from headway.planner.learner_step import LearnerStep
from headway.planner.setup import Setup
from headway.staleness import Admission

_BLOCK = 1024
"""Groups whose lengths are drawn at once."""

COHORT_RESPONSES = 4096
"""Responses a simulated step has at most, where there are engines enough to shrink the fleet."""


class Simulation:
    """One run. `total_groups` ends the issuing, as a run's own demand does; None never ends it."""

    def __init__(self, setup: Setup, *, num_steps: int, seed: int = 0, total_groups: int | None = None) -> None:
        self.setup, self._num_steps, self._total_groups = setup, num_steps, total_groups
        self._env = simpy.Environment()
        self.admission = Admission(
            max_staleness=setup.max_staleness,
            groups_per_step=setup.groups_per_step,
            over_bound=setup.over_bound,
            max_ready_batches=setup.max_ready_batches,
        )
        self._fleet = Fleet(self._env, setup, finish=self._turns_ended, busy_changed=self._engines_changed)
        self._rng = np.random.default_rng(seed)
        self._lengths = self._draw_lengths()
        self._jitter = factors(setup.learner.jitter, seed)
        self._groups: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._next_version = 0
        self._num_taken = 0
        self._learner_wants: simpy.Event | None = None
        self._step: LearnerStep | None = None
        self._controller_free = self._charged_until = 0.0
        self._issuing = False
        self.tally = Tally()

    def run(self) -> None:
        """Simulate until the last step is published."""
        learning = self._env.process(self._learn())
        self._fill()
        self._env.run(until=learning)

    @property
    def accounts(self) -> Accounts:
        """What became of every group issued."""
        return Accounts(
            issued=self.tally.issued,
            trained=self._num_taken,
            dropped=len(self.tally.dropped),
            generating=len(self._groups),
            ready=len(self._ready),
        )

    # Issue

    def _draw_lengths(self) -> Iterator[list[int]]:
        while True:
            yield from self.setup.lengths.draw(self._rng, _BLOCK, self.setup.group_size).tolist()

    def _fill(self) -> None:
        """Issue groups while demand and bound allow; a controller with work to do issues one and looks again."""
        while not self._issuing and self._demand() and (engine := self._fleet.pick(self._admits)) is not None:
            self._issue(engine)

    def _issue(self, engine: SimulatedEngine) -> None:
        group_id = self.tally.issued
        self.tally.issued += 1
        self.admission.issue(group_id, engine_version=engine.version)
        lengths = next(self._lengths)
        self.tally.issued_tokens += sum(lengths)
        self._groups[group_id] = Group(engine.version, lengths)
        turns = self.setup.tool.num_turns
        first = [
            Request(group_id, member, turn_tokens(length, 0, turns), self.setup.prompt_tokens, True)
            for member, length in enumerate(lengths)
        ]
        share = self.setup.shared.issue_share
        # Where this takes no time, the next group is issued by the loop that issued this one.
        self._issuing = share * self.setup.shared.controller_s > 0
        self._after_controller(share * len(first), lambda: self._issued(group_id, first))

    def _issued(self, group_id: int, first: list[Request]) -> None:
        self._submit(self._groups[group_id], first)
        if self._issuing:
            self._issuing = False
            self._fill()

    def _submit(self, group: Group, requests: list[Request]) -> None:
        group.engine = self._fleet.submit(group.engine, requests, oldest=group.version)

    def _admits(self, engine_version: int) -> bool:
        return self.admission.may_issue(policy_version=self._next_version, engine_version=engine_version)

    def _demand(self) -> bool:
        return self._total_groups is None or self._num_taken + self.admission.num_pending < self._total_groups

    # Episodes

    def _turns_ended(self, requests: list[Request], engine: SimulatedEngine) -> None:
        for request in requests:
            self._groups[request.group].tokens[request.member] += engine.versions(request)
        share = (1 - self.setup.shared.issue_share) / self.setup.tool.num_turns
        self._after_controller(share * len(requests), lambda: self._act(requests))

    def _act(self, requests: list[Request]) -> None:
        """The controller has what was said, and lets the environment answer."""
        tool = self.setup.tool
        if not tool.latency_s:
            self._step_episodes(requests)
            return
        delays = tool.latency_s * np.exp(tool.sigma * self._rng.standard_normal(len(requests)) - tool.sigma**2 / 2)
        for request, delay in zip(requests, delays.tolist(), strict=True):
            self._after(delay, lambda r=request: self._step_episodes([r]))

    def _step_episodes(self, requests: list[Request]) -> None:
        """The environment has answered: another turn, or the response is done."""
        done: list[Request] = []
        tool = self.setup.tool
        for request in requests:
            group = self._groups[request.group]
            said = sum(n for _, n in group.tokens[request.member])
            total = group.lengths[request.member]
            if said >= total:
                done.append(request)
                continue
            context = request.context + request.num_tokens + tool.observation_tokens
            tokens = turn_tokens(total, said, tool.num_turns)
            self._submit(group, [Request(request.group, request.member, tokens, context, False)])
        if done:
            self._members_done(done)

    def _members_done(self, requests: list[Request]) -> None:
        for request in requests:
            group = self._groups[request.group]
            group.left -= 1
            if not group.left:
                self._ready[request.group] = self._groups.pop(request.group)
                self.admission.ready(request.group, oldest_version=group.oldest_version)
        self._offer()
        self._fill()

    # Learner

    def _offer(self) -> None:
        """Hand the waiting learner its batch, if the bound lets one go."""
        if self._learner_wants is None:
            return
        for group_id in self.admission.expired(self._next_version):
            self.admission.remove(group_id)
            del self._ready[group_id]
            self.tally.dropped.append(self._next_version)
        chosen = self.admission.next_batch(self._next_version)
        if chosen is None:
            return
        self._num_taken += len(chosen)
        self._next_version += 1
        wants, self._learner_wants = self._learner_wants, None
        wants.succeed([self._ready.pop(group_id) for group_id in chosen])

    def _learn(self) -> Generator[simpy.Event, Any, None]:
        env, setup = self._env, self.setup
        syncing: simpy.Event = env.timeout(0)
        for version in range(self._num_steps):
            begun = env.now
            self._learner_wants = env.event()
            wants = self._learner_wants
            self._offer()
            self._fill()
            groups: list[Group] = yield wants
            self._fill()
            waited = env.now - begun
            num_tokens = sum(sum(g.lengths) for g in groups) + setup.batch_size * setup.prompt_tokens
            work_s = setup.learner.train(num_tokens, setup.learner_devices) * next(self._jitter)
            self._step = LearnerStep(env, setup, work_s)
            self._step.sharing(self._fleet.num_busy)
            self._lose(self._controller_free - max(env.now, self._charged_until))
            self._slow_engines()
            yield self._step.done
            self._step = None
            self._slow_engines()
            begun = env.now
            yield syncing
            waited += env.now - begun
            yield env.timeout(setup.sync.publish_s)
            syncing = env.process(self._sync(version + 1))
            self._record(version, groups, waited)

    def _sync(self, version: int) -> Generator[simpy.Event, Any, None]:
        sync = self.setup.sync
        how: dict[str, Any] = {"pause_s": sync.pause_s, "prefill_again": self.setup.on_update != "keep"}
        yield self._env.timeout(sync.transfer_s)
        if sync.spread_s:
            delays = self._rng.uniform(0, sync.spread_s, len(self._fleet.engines)).tolist()
            for engine, delay in zip(self._fleet.engines, delays, strict=True):
                self._after(delay, lambda e=engine: self._load_one(e, version, how))
            yield self._env.timeout(max(min(delays), min(sync.patience_s, max(delays))))
        else:
            self._fleet.load(version, **how)
        yield self._env.timeout(sync.pause_s)
        self._fill()

    def _load_one(self, engine: SimulatedEngine, version: int, how: dict[str, Any]) -> None:
        self._fleet.load_one(engine, version, **how)
        self._fill()

    def _engines_changed(self) -> None:
        if self._step is not None:
            self._step.sharing(self._fleet.num_busy)
        if self.setup.shared.num_cores:
            self._slow_engines()

    def _slow_engines(self) -> None:
        shared, trains = self.setup.shared, self._step is not None
        if shared.num_cores or shared.engine_slowdown != 1:
            slowdown = shared.engine_slowdown if trains else 1.0
            self._fleet.set_slowdown(slowdown * shared.crowding(self._fleet.num_busy + trains))

    def _record(self, version: int, groups: list[Group], waited_s: float) -> None:
        ages, sample_ages, masked = count_ages(
            (counts for group in groups for counts in group.tokens),
            version=version,
            max_staleness=self.setup.max_staleness,
        )
        self._fleet.advance()
        self.tally.steps.append(
            StepRecord(
                step=version,
                at_s=self._env.now,
                num_tokens=sum(ages.values()),
                waited_s=waited_s,
                engine_busy_s=self._fleet.busy_s,
                sampled_tokens=self._fleet.num_tokens,
                token_staleness=ages,
                sample_staleness=sample_ages,
                num_masked_tokens=masked,
                lengths_sum=sum(sum(g.lengths) for g in groups),
                decode_steps=self._fleet.num_steps,
                refills=self._fleet.num_refills,
            )
        )

    # Time

    def _after(self, delay: float, call: Callable[[], None]) -> None:
        event = self._env.timeout(delay)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: call())

    def _after_controller(self, num_responses: float, call: Callable[[], None]) -> None:
        """Do it when the controller, which is serial, has done as much work as so many responses take in all."""
        work_s = num_responses * self.setup.shared.controller_s
        if not work_s:
            call()
            return
        turns = 1.0 if self._step is None else 1 + self.setup.shared.standstill
        self._controller_free = max(self._env.now, self._controller_free) + work_s * turns
        self._lose(work_s)
        self._after(self._controller_free - self._env.now, call)

    def _lose(self, work_s: float) -> None:
        """Let a learner that trains lose its share of this work, the last that the controller has."""
        if self._step is not None and work_s > 0:
            self._step.lose(self.setup.shared.standstill_beside(self._fleet.num_busy) * work_s)
            self._charged_until = self._controller_free


def factors(spread: float, seed: int) -> Iterator[float]:
    """Log-normal factors of mean 1 and that standard deviation, as evenly spread as 16 quantiles, in random order.

    A sequence of its own: setups that are compared have the same luck.
    """
    sigma = math.sqrt(math.log1p(spread**2))
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)]
    block = np.exp(sigma * np.array(quantiles))
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from rng.permutation(block / block.mean()).tolist()


def simulate(
    setup: Setup,
    *,
    num_steps: int | None = None,
    warmup: int | None = None,
    seed: int = 0,
    cohort_responses: int = COHORT_RESPONSES,
) -> Forecast:
    """Rates of the steady state.

    `warmup` steps are left out (default 2·S + 4: the pipeline fills); `num_steps` are measured (default: as many as
    50,000 responses make, between 12 and 100). A fleet whose step has more than `cohort_responses` is
    simulated at a smaller scale and its rates scaled up (`Forecast.cohort`). Raises ValueError where a setting is out
    of range.
    """
    cohort = max(1, min(setup.batch_size // cohort_responses, setup.num_engines // 8))
    small = setup.shrunk(cohort)
    warmup = 2 * setup.max_staleness + 4 if warmup is None else max(1, warmup)
    measured = num_steps or min(100, max(12, 50_000 // small.batch_size))
    simulation = Simulation(small, num_steps=warmup + measured, seed=seed)
    simulation.run()
    return summarize(simulation.tally, simulation.accounts, setup=setup, simulated=small, warmup=warmup)
