"""Run folders as runs with known costs would have left them, by simulation."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from headway.config import RunConfig, load_config
from headway.ledger import Ledger
from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts
from headway.planner.engine import Request
from headway.planner.group import Group
from headway.planner.lengths import LogNormal
from headway.planner.setup import Setup
from headway.planner.simulate import Simulation
from headway.runtime.run_folder import RunFolder
from headway.types import Response

TRUE = Setup(
    groups_per_step=8,
    group_size=4,
    max_staleness=0,
    lengths=LogNormal(mean=20, cv=0.5, limit=60),
    engine=EngineCosts(step_s=0.004, sequence_s=0.0002),
    learner=LearnerCosts(token_s=0.0004),
    num_slots=32,
    prompt_tokens=6,
    sync=SyncCosts(publish_s=0.02, transfer_s=0.01),
    shared=SharedCosts(controller_s=0.002, num_cores=4),
)
LOADED = replace(
    TRUE,
    max_staleness=2,
    max_ready_batches=1,
    sync=replace(TRUE.sync, transfer_s=0.05),
    shared=replace(TRUE.shared, engine_slowdown=1.4, learner_slowdown=1.3),
)


def config_of(setup: Setup, num_steps: int) -> RunConfig:
    return load_config(
        None,
        [
            *(f"batch_size={setup.batch_size}", f"group_size={setup.group_size}", f"num_steps={num_steps}"),
            *(f"max_staleness={setup.max_staleness}", f"engines.num_slots={setup.num_slots}"),
            f"engines.num_engines={setup.num_engines}",
        ],
    )


FIXED_S = 0.005
"""What the controller of these runs does once a step."""


class Counted(Simulation):
    """A simulation that keeps how many responses began and ended, and what the controller did, up to every step."""

    def __init__(self, setup: Setup, *, num_steps: int) -> None:
        super().__init__(setup, num_steps=num_steps)
        self.counts: list[tuple[int, int, float]] = []
        self._num_finished, self._worked_s = 0, 0.0

    def _after_controller(self, num_responses: float, call: Callable[[], None]) -> None:
        self._worked_s += num_responses * self.setup.shared.controller_s
        super()._after_controller(num_responses, call)

    def _members_done(self, requests: list[Request]) -> None:
        self._num_finished += len(requests)
        super()._members_done(requests)

    def _record(self, version: int, groups: list[Group], waited_s: float) -> None:
        super()._record(version, groups, waited_s)
        self.counts.append((self.tally.issued * self.setup.group_size, self._num_finished, self._worked_s))


def written(path: Path, setup: Setup, num_steps: int = 30) -> Path:
    """A run folder as a run with these costs would have left it."""
    folder = RunFolder.create(path, config_of(setup, num_steps))
    simulation = Counted(setup, num_steps=num_steps)
    simulation.run()
    with folder.metrics_path.open("w") as file:
        steps = zip(simulation.tally.steps, simulation.counts, strict=True)
        for (before, counted_before), (now, counted) in pairwise(steps):
            started, finished, worked_s = np.subtract(counted, counted_before).tolist()
            step_s = now.at_s - before.at_s
            train_s = step_s - now.waited_s - setup.sync.publish_s
            sampled = now.sampled_tokens - before.sampled_tokens
            decoded = now.decode_steps - before.decode_steps
            refills = now.refills - before.refills
            busy_s = now.engine_busy_s - before.engine_busy_s
            record = {
                "kind": "step",
                "step": now.step,
                "step_s": step_s,
                "controller_s": worked_s + FIXED_S,
                "num_started": started,
                "num_finished": finished,
                "num_tokens": now.num_tokens,
                "num_masked_tokens": now.num_masked_tokens,
                "train_s": train_s,
                "trained_tokens_per_s": (now.lengths_sum + setup.batch_size * setup.prompt_tokens) / train_s,
                "sampled_tokens_per_s": sampled / step_s,
                "mean_active": sampled / decoded if decoded else 0.0,
                "decode_active": sampled / decoded if decoded else 0.0,
                "decode_step_s": (busy_s - refills * setup.engine.refill_s) / decoded if decoded else 0.0,
                "num_decode_steps": decoded,
                "num_refills": refills,
                "engine_idle": 1 - busy_s / step_s / setup.num_engines,
                "learner_idle": now.waited_s / step_s,
                "publish_lag_s": setup.sync.transfer_s,
                "turns": 1.0,
                "staleness_token_mean": sum(a * n for a, n in now.token_staleness.items()) / now.num_tokens,
            }
            file.write(json.dumps(record) + "\n")
    write_lengths(folder, setup)
    return path


def write_lengths(folder: RunFolder, setup: Setup) -> None:
    lengths = setup.lengths.draw(np.random.default_rng(0), 1000, setup.group_size)
    with closing(Ledger(folder.ledger_path, group_size=setup.group_size, create=True)) as ledger:
        for group_id, members in enumerate(lengths.tolist()):
            ledger.issue(group_id, 0)
            for member, n in enumerate(members):
                ledger.finish(group_id, member, response(n))


def response(num_tokens: int) -> Response:
    return Response(
        token_ids=np.zeros(num_tokens, np.int32),
        mask=np.ones(num_tokens, bool),
        versions=np.zeros(num_tokens, np.int32),
        reward=0.0,
        behavior_logprobs=np.zeros(num_tokens, np.float32),
    )
