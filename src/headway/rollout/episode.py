"""One attempt at one prompt. Token-in, token-out: what is trained on is what was served."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headway.protocols import Engine, Environment
from headway.rollout.transcript import Transcript
from headway.types import FinishReason, Prompt, Response, Sampling


class EnvironmentFailed(RuntimeError):
    """The environment raised; its exception is the cause."""


async def run_episode(
    engine: Engine,
    environment: Environment,
    prompt: Prompt,
    sampling: Sampling,
    *,
    decode: Callable[[Sequence[int]], str],
    max_response_tokens: int,
    max_turns: int,
    on_tokens: Callable[[int], None] | None = None,
    name: str = "",
) -> Response:
    """Play `prompt` to its end and return everything after it.

    A turn has at most `sampling.max_tokens` tokens, the response at most `max_response_tokens`, tool output
    included; `decode` turns sampled tokens into text without special tokens. `on_tokens(n)`: n more tokens were
    sampled. One seed serves the whole episode, since an engine draws by (seed, position). `name` labels errors.

    Raises EnvironmentFailed, EngineDied, BadCompletion.
    """
    if min(max_response_tokens, max_turns, sampling.max_tokens) < 1:
        raise ValueError(
            f"max_response_tokens={max_response_tokens}, max_turns={max_turns} and "
            f"sampling.max_tokens={sampling.max_tokens} must be at least 1"
        )
    origin = engine.origin(sampling)
    name = f"{name or f'prompt {prompt.split}/{prompt.index}'} on engine {origin.engine!r}"
    transcript = Transcript(prompt.token_ids, name)
    with _environment_at_work(name):
        episode = environment.start(prompt)
    reward, num_turns, ended = 0.0, 0, False
    while True:
        limit = min(sampling.max_tokens, max_response_tokens - transcript.num_response)
        said = await _sample_turn(engine, transcript, sampling, limit, on_tokens)
        num_turns += 1
        with _environment_at_work(name):
            turn = await episode.step(decode(said.message))
            reward += _finite(turn.reward)
            ended = turn.observation is None or num_turns == max_turns or said.out_of_context
            shown = environment.observe(turn.observation or "", said.is_closed) if not ended else np.empty(0, np.int32)
        # Shown only with room left for an answer, so that a response ends on a sampled token.
        overflow = transcript.num_response + len(shown) >= max_response_tokens
        if ended or overflow:
            truncated = said.finish_reason == "length" or not ended
            return transcript.response(reward=reward, num_turns=num_turns, truncated=truncated, origin=origin)
        transcript.add_observation(shown)


@dataclass(frozen=True, slots=True)
class _Said:
    """One turn of the policy, interruptions mended."""

    message: list[int]
    """Without its stop token."""
    is_closed: bool
    """The stop token was sampled."""
    finish_reason: FinishReason
    out_of_context: bool
    """The engine stopped before the limit for want of context: it could not serve another turn."""


async def _sample_turn(
    engine: Engine,
    transcript: Transcript,
    sampling: Sampling,
    limit: int,
    on_tokens: Callable[[int], None] | None,
) -> _Said:
    """Ask until the turn is over; an interrupted request goes on from the tokens it already has."""
    said: list[int] = []
    reason: FinishReason = "interrupt"
    while reason == "interrupt":
        room = limit - len(said)
        completion = await engine.generate(transcript.request(), replace(sampling, max_tokens=room))
        transcript.add_sampled(completion, room)
        said += [int(token) for token in completion.token_ids]
        if on_tokens is not None and len(completion.token_ids):
            on_tokens(len(completion.token_ids))
        reason = completion.finish_reason
        if reason == "interrupt":
            reason = "length" if len(said) == limit else reason
            # An engine that is interrupted over and over must not keep a time-out from striking.
            await asyncio.sleep(0)
    is_closed = said[-1] in sampling.stop_token_ids
    return _Said(
        message=said[:-1] if is_closed else said,
        is_closed=is_closed,
        finish_reason=reason,
        out_of_context=reason == "length" and len(said) < limit,
    )


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"reward is {reward}; an environment must return a finite number")
    return float(reward)


@contextmanager
def _environment_at_work(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EnvironmentFailed(f"{name}: the environment raised {type(error).__name__}: {error}") from error
