"""Recorded batches under several algorithms: how near each one's gradient is to the on-policy gradient.

Reads a run folder, also of a run under way; writes nothing there and takes no lock.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.fresh import PromptChoice, draw_fresh, fresh_prompts
from headway.runtime.head import tiles_of
from headway.runtime.learners import load_learner
from headway.runtime.measure import Bench, Reference, StepResult, batch_facts, score_all, score_with, with_differences
from headway.runtime.methods import Method, choose_baseline, parse_methods, refuse_unfed
from headway.runtime.offline import in_process_engine, verified_checkpoint, with_settings
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import open_task
from headway.runtime.wiring import episode_settings
from headway.training.batching import Rows, check_origins, check_vocabulary, collate
from headway.training.finite import named
from headway.training.gradients import PROJECTION_DIMS, Projection
from headway.training.learner import TorchLearner
from headway.training.objectives import entropy_used
from headway.types import Batch


class CompareError(HeadwayError, ValueError):
    """What was asked for cannot be compared; the message names it and the mend."""


def compare_run(
    folder: RunFolder,
    config: RunConfig,
    *,
    algorithms: str | None,
    steps: str | None,
    baseline: str | None,
    num_fresh: int,
    prompts: PromptChoice,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All steps and algorithms asked for, as plain data (docs/compare.md). Raises CompareError, MethodError.

    `algorithms` and `steps` are comma-separated.
    """
    methods = parse_methods(algorithms, config)
    base = choose_baseline(methods, baseline, config)
    chosen = choose_steps(folder, steps)
    if notice := teacher_notice(config):
        say(notice)
    bench = Workbench(folder, config, num_fresh=num_fresh, prompts=prompts, say=say)
    return {
        "run": str(folder.path),
        "baseline": base,
        "fresh_batches": num_fresh,
        "prompts": prompts,
        "behavior_entropy": config.behavior_entropy,
        "projection_dims": PROJECTION_DIMS,
        "steps": [asdict(bench.examine(step, methods, baseline=base)) for step in chosen],
    }


def teacher_notice(config: RunConfig) -> str:
    """What is not compared of a run with a teacher; empty for one without."""
    distill = config.distill
    if not distill.teacher:
        return ""
    beside = "beside the rewards" if distill.reward_weight else "alone: no algorithm had a part in it"
    return (
        f'the run learned from its teacher (distill.method = "{distill.method}") {beside}; '
        "that loss is not compared, algorithms are held on the rewards of its task"
    )


def choose_steps(folder: RunFolder, text: str | None) -> list[int]:
    """The steps to look at, ascending: those asked for, or the newest on record. Raises CompareError."""
    recorded = list(recorded_steps(folder.batches))
    if not recorded:
        raise CompareError(f"{folder.path} holds no recorded batches; set record = true before the run")
    if text is None:
        return recorded[-1:]
    words = text.split(",")
    wrong = [word for word in words if not word.strip().isdecimal()]
    if wrong:
        raise CompareError(f"steps are numbers with commas between them, such as 10,20; got {wrong[0]!r}")
    asked = {int(word) for word in words}
    if missing := sorted(asked - set(recorded)):
        raise CompareError(f"steps {missing} are not on record; {folder.path} has {recorded[0]} to {recorded[-1]}")
    return sorted(asked)


class Workbench:
    """Takes the steps of one run, in ascending order, and measures algorithms on them.

    Args:
        num_fresh: how many fresh batches of the recorded batch's size make a reference, at least 2.
        prompts: whether they ask the recorded prompts again, or those the run issues after them.
    """

    def __init__(
        self, folder: RunFolder, config: RunConfig, *, num_fresh: int, prompts: PromptChoice, say: Callable[[str], None]
    ) -> None:
        if config.routing_replay:
            raise CompareError(
                f"{folder.path} was trained with routing_replay = true; a comparison would score its tokens with other "
                "experts. Compare a run without it"
            )
        self._folder, self._config, self._say = folder, config, say
        self._num_fresh = num_fresh
        self._prompts: PromptChoice = prompts
        self._learner: TorchLearner | None = None
        self._checkpoint = 0
        self._projection: Projection | None = None
        autocast = pick_dtype(config.model.dtype, pick_device(config.learner.device))
        self._settings = {
            "temperature": config.sampling.temperature,
            "autocast": autocast,
            "tiles": tiles_of(config),
        }
        _, source = verified_checkpoint(folder, at_most=config.num_steps)
        settings = {"model.path": str(source), "task.latency_s": 0.0}
        self._task = open_task(with_settings(config, settings), say=say)

    def examine(self, step: int, methods: Sequence[Method], *, baseline: str) -> StepResult:
        """Measure all methods on the batch of a step, each against the reference of its own objective."""
        batch = read_batch(self._folder.batches, step)
        check_origins(batch, temperature=self._config.sampling.temperature)
        learner = self._advance(step)
        check_vocabulary(batch, learner.model.config.vocab_size)
        rows = collate(batch, pad_id=0)
        logprobs, entropy = score_all(learner.model, self._settings, rows, self._config.learner.micro_batch_tokens)
        rows = replace(rows, behavior_entropy=entropy_used(self._config.behavior_entropy, rows, entropy))
        refuse_unfed(methods, batch, rows, where=str(self._folder.path))
        bench = self._bench(learner, batch, rows, logprobs)
        references: dict[tuple[str, str, int | None], Reference] = {}
        judged = []
        for method in methods:
            self._say(f"step {step}: {method.label}")
            with named(batch):
                if method.objective not in references:
                    references[method.objective] = bench.reference(method.objective)
                judged.append(bench.judge(method, references[method.objective]))
        return StepResult(
            step=step,
            policy_version=learner.policy_version,
            checkpoint=self._checkpoint,
            batch=batch_facts(rows, bench.logprobs, learner.policy_version),
            projection_error=max(one.projection_error for one in judged),
            references=tuple(reference.result for reference in references.values()),
            algorithms=with_differences(judged, baseline),
        )

    def _advance(self, step: int) -> TorchLearner:
        """The learner as it was before `step`: the nearest checkpoint, then the recorded batches after it."""
        checkpoint, directory = verified_checkpoint(self._folder, at_most=step)
        if self._learner is None or self._learner.policy_version < checkpoint:
            self._learner = load_learner(self._config, directory)
            self._checkpoint = checkpoint
        learner = self._learner
        if learner.policy_version < step:
            self._say(f"training steps {learner.policy_version} to {step - 1} again")
        for earlier in range(learner.policy_version, step):
            learner.train(read_batch(self._folder.batches, earlier))
        learner.model.zero_grad(set_to_none=True)
        return learner

    def _bench(self, learner: TorchLearner, batch: Batch, rows: Rows, logprobs: Tensor) -> Bench:
        """Fresh samples, scores, and the projection, which is one for all steps."""
        model = learner.model
        self._say(f"step {batch.step}: drawing {self._num_fresh} fresh batches of version {learner.policy_version}")
        fresh = self._draw(learner, batch)
        self._projection = self._projection or Projection(list(model.parameters()))
        score = partial(score_with, model, self._settings)
        max_tokens = self._config.learner.micro_batch_tokens
        indices = torch.tensor([group.prompt.index for group in (*batch.groups, *fresh.groups)])
        distinct, units = torch.unique(indices, return_inverse=True)
        return Bench(
            model=model,
            score=score,
            max_tokens=max_tokens,
            projection=self._projection,
            rows=rows,
            logprobs=logprobs,
            prompts=units[: len(batch.groups)],
            fresh=collate(fresh, pad_id=0),
            fresh_prompts=units[len(batch.groups) :],
            num_fresh=self._num_fresh,
            num_prompts=len(distinct),
        )

    def _draw(self, learner: TorchLearner, batch: Batch) -> Batch:
        """Fresh batches, one after the other, as one."""
        config, environment = self._config, self._task.environment
        prompts = fresh_prompts(
            batch,
            num_batches=self._num_fresh,
            choice=self._prompts,
            environment=environment,
            run_seed=config.seed,
        )
        return draw_fresh(
            prompts,
            engine=in_process_engine(config, learner),
            policy_version=learner.policy_version,
            environment=environment,
            settings=episode_settings(config, self._task),
            decode=self._task.decode,
        )
