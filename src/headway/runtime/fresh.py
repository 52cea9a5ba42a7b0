"""Samples of the policy as it is now, drawn in this process: what stale data is measured against."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from headway.engine.in_process import InProcessEngine
from headway.errors import HeadwayError
from headway.protocols import Environment, RequestRefused
from headway.rollout.group import EpisodeFailed, run_group
from headway.rollout.order import prompt_index
from headway.runtime.failures import first_error
from headway.runtime.rollouts import EpisodeSettings
from headway.types import Batch, Group, Prompt

PromptChoice = Literal["same", "further"]


class FreshSamplesFailed(HeadwayError, RuntimeError):
    """An episode could not be played; the message holds the reason."""


def fresh_prompts(
    batch: Batch, *, num_batches: int, choice: PromptChoice, environment: Environment, run_seed: int
) -> list[Prompt]:
    """The prompts of `num_batches` fresh batches: the recorded ones each time, or those issued after them."""
    if choice == "same":
        return [group.prompt for _ in range(num_batches) for group in batch.groups]
    first = max(group.group_id for group in batch.groups) + 1
    size = environment.size("train")
    ids = range(first, first + num_batches * len(batch.groups))
    return [environment.prompt("train", prompt_index(id, size, run_seed)[1]) for id in ids]


def draw_fresh(
    prompts: Sequence[Prompt],
    *,
    engine: InProcessEngine,
    policy_version: int,
    environment: Environment,
    settings: EpisodeSettings,
    decode: Callable[[Sequence[int]], str],
) -> Batch:
    """One group for each prompt, all of `policy_version`, as the batch of the step that trains it.

    Deterministic. The random streams are never those of the run. Raises FreshSamplesFailed.
    """

    async def pick_engine() -> InProcessEngine:
        return engine

    async def draw(number: int, prompt: Prompt) -> Group:
        return await run_group(
            policy_version * len(prompts) + number,
            prompt,
            environment=environment,
            pick_engine=pick_engine,
            sampling=settings.sampling,
            group_size=settings.group_size,
            run_seed=-1 - settings.run_seed,  # a run's own seed is never negative
            decode=decode,
            max_response_tokens=settings.max_response_tokens,
            max_turns=settings.max_turns,
            attempts=settings.attempts,
            episode_timeout_s=None,  # all wait for one engine, so time says nothing of an episode
        )

    async def draw_all() -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            drawn = [tasks.create_task(draw(number, prompt)) for number, prompt in enumerate(prompts)]
        return [task.result() for task in drawn]

    try:
        groups = asyncio.run(draw_all())
    except BaseExceptionGroup as failures:
        error = first_error(failures)
        if isinstance(error, EpisodeFailed | RequestRefused):
            raise FreshSamplesFailed(f"no fresh samples of version {policy_version}: {error}") from error
        raise error from error.__cause__
    return Batch(step=policy_version, policy_version=policy_version, groups=tuple(groups))
