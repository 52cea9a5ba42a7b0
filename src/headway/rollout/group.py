"""All attempts at one prompt, side by side, and what happens when one of them fails."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from headway.protocols import Engine, EngineDied, Environment
from headway.rollout.episode import EnvironmentFailed, run_episode
from headway.rollout.scoring import Score
from headway.types import Group, Prompt, Response, Sampling


class EpisodeFailed(RuntimeError):
    """A member failed in every attempt, so its group has no whole baseline. `cause` is the last exception."""

    def __init__(self, group_id: int, member: int, cause: Exception) -> None:
        super().__init__(f"group {group_id}, member {member}: {cause}")
        self.group_id = group_id
        self.member = member
        self.cause = cause


class EpisodeTimeout(TimeoutError):
    """An episode took longer than its limit."""


def _ignore(*_: Any) -> None: ...


def sample_seed(run_seed: int, group_id: int, member: int) -> int:
    """63-bit seed of one sample: the same on every machine and in every attempt."""
    digest = blake2b(f"{run_seed}/{group_id}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_group(
    group_id: int,
    prompt: Prompt,
    *,
    environment: Environment,
    pick_engine: Callable[[], Awaitable[Engine]],
    sampling: Sampling,
    group_size: int,
    run_seed: int,
    decode: Callable[[Sequence[int]], str],
    max_response_tokens: int,
    max_turns: int,
    attempts: int = 1,
    episode_timeout_s: float | None = None,
    score: Score | None = None,
    finished: Mapping[int, Response] | None = None,
    on_finish: Callable[[int, Response], None] = _ignore,
    on_discard: Callable[[int, int], None] = _ignore,
    on_tokens: Callable[[int], None] = _ignore,
) -> Group:
    """Run the members 0 … G−1 that `finished` lacks, and return the whole group.

    `pick_engine()` waits for a living engine, and may raise to give up. `on_finish(member, response)` comes as
    soon as a member ends; `on_discard(member, n)` when n sampled tokens are lost with an attempt, for whatever
    reason, cancellation included. An environment that raises, or an episode longer than `episode_timeout_s`,
    costs one of `attempts`; a dead engine costs none. With `score`, a member ends when a teacher has scored it, and
    the time that takes is not the episode's.

    Raises EpisodeFailed; BadCompletion and other faults of an engine pass through. The other members are
    canceled then.
    """
    if attempts < 1 or group_size < 1:
        raise ValueError(f"attempts={attempts} and group_size={group_size} must be at least 1")
    done = dict(finished or {})

    async def play(member: int, count: Callable[[int], None]) -> Response:
        name = f"group {group_id}, member {member} (prompt {prompt.split}/{prompt.index})"
        # Every attempt keeps the seed: drawing afresh would favor answers that do not crash the tool.
        seeded = replace(sampling, seed=sample_seed(run_seed, group_id, member))
        engine = await pick_engine()
        episode = run_episode(
            engine,
            environment,
            prompt,
            seeded,
            decode=decode,
            max_response_tokens=max_response_tokens,
            max_turns=max_turns,
            on_tokens=count,
            name=name,
        )
        response = await _within(episode_timeout_s, episode, name)
        # Inside the attempt: tokens that a stop keeps from being scored are reported as discarded.
        return await score(prompt, response) if score else response

    async def run_member(member: int) -> None:
        try:
            response = await _persist(
                partial(play, member), attempts, on_tokens=on_tokens, on_discard=partial(on_discard, member)
            )
        except (EnvironmentFailed, EpisodeTimeout) as error:
            raise EpisodeFailed(group_id, member, error) from error
        done[member] = response
        on_finish(member, response)

    await _all([run_member(member) for member in range(group_size) if member not in done])
    return Group(group_id, prompt, tuple(done[member] for member in range(group_size)))


_Play = Callable[[Callable[[int], None]], Awaitable[Response]]
"""One attempt; reports the tokens it samples to its argument."""


async def _persist(
    play: _Play, attempts: int, *, on_tokens: Callable[[int], None], on_discard: Callable[[int], None]
) -> Response:
    """Play through deaths of engines, and up to `attempts` times through faults of the environment."""
    while True:
        try:
            return await _attempt(play, on_tokens=on_tokens, on_discard=on_discard)
        except EngineDied:
            await asyncio.sleep(0)  # the supervisor sees the death before an engine is picked again
        except (EnvironmentFailed, EpisodeTimeout):
            attempts -= 1
            if attempts == 0:
                raise


async def _attempt(play: _Play, *, on_tokens: Callable[[int], None], on_discard: Callable[[int], None]) -> Response:
    """Play once; the tokens of an attempt that comes to nothing are reported as discarded."""
    num_tokens = 0

    def count(num: int) -> None:
        nonlocal num_tokens
        num_tokens += num
        on_tokens(num)

    try:
        return await play(count)
    except BaseException:
        if num_tokens:
            on_discard(num_tokens)
        raise


async def _within(seconds: float | None, episode: Coroutine[Any, Any, Response], name: str) -> Response:
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            return await episode
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise EpisodeTimeout(
            f"{name} took longer than episode_timeout_s = {seconds} s: raise it, or lower max_response_tokens"
        ) from error


async def _all(members: list[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(member)
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
