"""Held-out accuracy, attributed to one policy version."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headway.protocols import Environment, RequestRefused
from headway.rollout.group import EpisodeFailed, run_group
from headway.runtime.local import EnginePool
from headway.runtime.rollouts import EpisodeSettings
from headway.types import Group, Sampling, Split


class MixedVersions(AssertionError):
    """An evaluation saw tokens of more than one version."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward of greedy answers to the first prompts of a split.

    Example: `Evaluation(policy_version=40, split="validation", num_prompts=200, accuracy=0.83, …)`
    """

    policy_version: int
    split: Split
    num_prompts: int
    accuracy: float
    mean_tokens: float
    num_failed: int
    """Prompts whose episode failed in every attempt; they count as reward 0."""
    last_failure: str | None = None
    """Why the last of them failed; None when none did."""


async def evaluate(
    split: Split,
    num_prompts: int,
    policy_version: int,
    *,
    environment: Environment,
    engines: EnginePool,
    settings: EpisodeSettings,
    decode: Callable[[Sequence[int]], str],
) -> Evaluation:
    """Ask the first `num_prompts` prompts of a split greedily, ahead of waiting rollouts.

    The loop publishes no version meanwhile, so all tokens are of `policy_version`; MixedVersions is raised if not.
    """
    greedy = replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=0, priority=-1)
    greedy = replace(greedy, num_draws=0, num_top=0, record_routing=False)

    num_prompts = min(num_prompts, environment.size(split))
    groups, failures = await ask(
        split,
        num_prompts,
        environment=environment,
        engines=engines,
        sampling=greedy,
        settings=settings,
        decode=decode,
        oldest=policy_version,
    )
    responses = [group.responses[0] for group in groups]
    versions = {v for r in responses for v in (r.oldest_version, r.newest_version)}
    if versions - {policy_version}:
        raise MixedVersions(f"evaluation of version {policy_version} saw tokens of versions {sorted(versions)}")
    return Evaluation(
        policy_version=policy_version,
        split=split,
        num_prompts=num_prompts,
        accuracy=sum(r.reward for r in responses) / num_prompts,
        mean_tokens=sum(r.num_sampled for r in responses) / max(1, len(responses)),
        num_failed=len(failures),
        last_failure=str(failures[-1]) if failures else None,
    )


async def ask(
    split: Split,
    num_prompts: int,
    *,
    environment: Environment,
    engines: EnginePool,
    sampling: Sampling,
    settings: EpisodeSettings,
    decode: Callable[[Sequence[int]], str],
    oldest: int = 0,
) -> tuple[list[Group], list[Exception]]:
    """One answer each to the first prompts of a split, and why the prompts without one failed in every attempt.

    Only engines that hold version `oldest` or a newer one are asked.
    """

    async def answer(index: int) -> Group | Exception:
        try:
            return await run_group(
                index,
                environment.prompt(split, index),
                environment=environment,
                pick_engine=engines.affine(oldest),
                sampling=sampling,
                group_size=1,
                run_seed=settings.run_seed,
                decode=decode,
                max_response_tokens=settings.max_response_tokens,
                max_turns=settings.max_turns,
                attempts=settings.attempts,
                episode_timeout_s=settings.episode_timeout_s,
            )
        except (EpisodeFailed, RequestRefused) as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        asked = min(num_prompts, environment.size(split))
        answers = [tasks.create_task(answer(index)) for index in range(asked)]
    found = [task.result() for task in answers]
    return [one for one in found if isinstance(one, Group)], [one for one in found if isinstance(one, Exception)]


def failures_line(num_failed: int, num_asked: int, last: object) -> str:
    """What a user is told of episodes that failed.

    >>> failures_line(2, 48, "the tool is down")
    '2 of 48 episodes failed; the last: the tool is down'
    """
    return f"{num_failed} of {num_asked} episodes failed; the last: {last}"
