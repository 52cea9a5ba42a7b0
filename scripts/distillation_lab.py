"""Distillation with an exact staleness in one process: the runtime's own parts without its processes and queues.

Engine, teacher and learner are those of a run, taken in turn, so hundreds of short runs cost seconds each and two of
the same settings are bit-identical. It is what `exact_lag = true` trains, at the cost of arithmetic alone.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from headway.algorithms import find_distillation
from headway.cache import CacheKind, student_ids
from headway.config import RunConfig
from headway.engine.in_process import InProcessEngine
from headway.engine.torch_engine import TorchEngine
from headway.models.loading import load_causal_lm
from headway.rollout.group import run_group
from headway.rollout.order import prompt_index
from headway.rollout.scoring import with_scores
from headway.runtime.learners import load_learner
from headway.runtime.rollouts import EpisodeSettings
from headway.runtime.task import Task
from headway.runtime.teachers import cache_width, num_top
from headway.runtime.wiring import episode_settings
from headway.teacher.messages import Score
from headway.teacher.scorer import Scorer
from headway.training.learner import TorchLearner
from headway.types import Batch, Group


class Lab:
    """A learner, and batches for it that were sampled exactly `max_staleness` versions ago (fewer at the start)."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.learner: TorchLearner = load_learner(config, task.model)
        self.teacher = load_causal_lm(task.teacher)
        student = self.learner.model.config
        engines = config.engines
        self._engine = TorchEngine(student, max_slots=engines.num_slots, max_length=engines.max_length)
        self._scorer = Scorer(
            self.teacher,
            student_vocab_size=student.vocab_size,
            temperature=config.distill.temperature,
            batch_tokens=config.distill.batch_tokens,
            autocast=torch.float32,
        )
        self._config, self._task = config, task
        self._settings = episode_settings(config, task)
        self._kind: CacheKind = find_distillation(config.distill.method).cache
        self._num_sampled = 0

    def batches(self) -> Iterator[Batch]:
        """One a step, each to be trained before the next is asked for."""
        waiting: deque[Batch] = deque()
        for version in range(self._config.num_steps):
            self._engine.load(self.learner.weights(), version)
            while self._num_sampled <= min(version + self._config.max_staleness, self._config.num_steps - 1):
                waiting.append(self._sample(self._num_sampled))
                self._num_sampled += 1
            yield waiting.popleft()

    @torch.inference_mode()
    def _sample(self, step: int) -> Batch:
        """The batch of a step, sampled now."""
        first = step * self._config.groups_per_step
        groups = asyncio.run(self._roll_out(range(first, first + self._config.groups_per_step)))
        responses = [(group.prompt, response) for group in groups for response in group.responses]
        width, top = cache_width(self._config), num_top(self._config)
        asked = [
            Score(i, np.concatenate([prompt.token_ids, r.token_ids]), student_ids(self._kind, r, width), top)
            for i, (prompt, r) in enumerate(responses)
        ]
        answers = iter(self._scorer.score(asked))
        scored = [replace(g, responses=tuple(with_scores(r, next(answers)) for r in g.responses)) for g in groups]
        return Batch(step=step, policy_version=step, groups=tuple(scored))

    async def _roll_out(self, group_ids: range) -> list[Group]:
        engine, settings = InProcessEngine(self._engine, dtype="float32"), self._settings
        return await asyncio.gather(*(self._play(id, engine, settings) for id in group_ids))

    async def _play(self, group_id: int, engine: InProcessEngine, settings: EpisodeSettings) -> Group:
        async def pick_engine() -> InProcessEngine:
            return engine

        environment = self._task.environment
        _, index = prompt_index(group_id, environment.size("train"), settings.run_seed)
        return await run_group(
            group_id,
            environment.prompt("train", index),
            environment=environment,
            pick_engine=pick_engine,
            sampling=settings.sampling,
            group_size=settings.group_size,
            run_seed=settings.run_seed,
            decode=self._task.decode,
            max_response_tokens=settings.max_response_tokens,
            max_turns=settings.max_turns,
        )
