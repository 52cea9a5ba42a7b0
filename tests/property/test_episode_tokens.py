"""Whatever an engine does between two tokens, what is trained on is what was served."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.envs.turns import Turn
from headway.protocols import WeightRef
from headway.rollout import run_episode
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Prompt, Sampling, SideData, Split

STOP = 0
ROUTING_SHAPE = (2, 3)


@dataclass
class ScriptedEngine:
    """Returns random chunks, interrupts at random points, moves to later versions at random."""

    rng: np.random.Generator
    log: list[tuple[str, Ints]]
    with_logprobs: bool
    completions: list[Completion] = field(default_factory=list)
    version: int = 0

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        served = np.concatenate([ids for _, ids in self.log])
        assert np.array_equal(token_ids, served), "the request is not the prompt and everything served since"
        assert sampling.max_tokens >= 1
        completion = self._complete(len(token_ids), sampling)
        self.completions.append(completion)
        self.log.append(("sampled", completion.token_ids))
        return completion

    def _complete(self, num_request: int, sampling: Sampling) -> Completion:
        num = int(self.rng.integers(0, sampling.max_tokens + 1))
        reason = "length" if num == sampling.max_tokens else "interrupt"
        tokens = self.rng.integers(1, 50, num).astype(np.int32)
        if num and self.rng.random() < 0.5:
            tokens[-1], reason = STOP, "stop"
        versions = self.version + np.sort(self.rng.integers(0, 3, num)).astype(np.int32)
        self.version = int(versions[-1]) if num else self.version
        side = SideData(
            draw_ids=self.rng.integers(0, 50, (num, 4)).astype(np.int32),
            draw_logprobs=-self.rng.random((num, 4)).astype(np.float32),
            kept_mass=self.rng.random(num).astype(np.float32),
            routing=self.rng.integers(0, 8, (num_request + num, *ROUTING_SHAPE)).astype(np.int32),
        )
        return Completion(
            token_ids=tokens,
            versions=versions,
            finish_reason=reason,
            logprobs=-self.rng.random(num).astype(np.float32) if self.with_logprobs else None,
            entropy=self.rng.random(num).astype(np.float32),
            side=side,
        )

    async def update_weights(self, ref: WeightRef) -> None: ...
    async def interrupt(self) -> None: ...
    async def status(self) -> EngineStatus:
        raise AssertionError("an episode has no need of it")

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        return LogprobOrigin("behavior", "scripted", "float32", sampling.temperature)


@dataclass
class RandomTools:
    """An environment whose observations are random tokens, or none; remembers what it was told."""

    rng: np.random.Generator
    log: list[tuple[str, Ints]]
    heard: list[str] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = (STOP,)

    def size(self, split: Split) -> int:
        return 1

    def prompt(self, split: Split, index: int) -> Prompt:
        raise AssertionError("an episode is given its prompt")

    def start(self, prompt: Prompt) -> "RandomTools":
        return self

    async def step(self, text: str) -> Turn:
        self.heard.append(text)
        return Turn(0.25, None if self.rng.random() < 0.2 else "shown")

    def observe(self, text: str, after_stop: bool) -> Ints:
        assert after_stop == (self.log[-1][1][-1] == STOP)
        shown = self.rng.integers(50, 99, self.rng.integers(0, 6)).astype(np.int32)
        self.log.append(("shown", shown))
        return shown


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


@given(
    seed=st.integers(0, 2**32),
    max_response_tokens=st.integers(1, 60),
    max_tokens=st.integers(1, 20),
    max_turns=st.integers(1, 8),
    with_logprobs=st.booleans(),
)
def test_trained_tokens_are_the_served_ones(seed, max_response_tokens, max_tokens, max_turns, with_logprobs):
    rng = np.random.default_rng(seed)
    prompt = Prompt(0, "train", rng.integers(1, 50, rng.integers(1, 9)).astype(np.int32))
    log = [("prompt", prompt.token_ids)]
    engine, environment = ScriptedEngine(rng, log, with_logprobs), RandomTools(rng, log)
    counted: list[int] = []
    response = asyncio.run(
        run_episode(
            engine,
            environment,
            prompt,
            Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            decode=decode,
            max_response_tokens=max_response_tokens,
            max_turns=max_turns,
            on_tokens=counted.append,
        )
    )
    if log[-1][0] == "shown":  # an observation that left no room was not shown after all
        assert response.truncated
        log.pop()
    kinds = np.concatenate([np.full(len(ids), kind == "sampled") for kind, ids in log[1:]])
    assert np.array_equal(response.token_ids, np.concatenate([ids for _, ids in log[1:]]))
    assert np.array_equal(response.mask, kinds)
    assert 1 <= len(response.token_ids) <= max_response_tokens
    assert response.mask[-1]
    assert sum(counted) == response.num_sampled
    assert response.num_turns == len(environment.heard) <= max_turns
    assert response.reward == 0.25 * response.num_turns
    check_what_each_token_carries(response, engine)
    check_what_was_heard(log, environment)


def check_what_each_token_carries(response, engine):
    mask, done = response.mask, engine.completions
    assert np.array_equal(response.versions[mask], np.concatenate([c.versions for c in done]))
    assert (response.versions[~mask] == -1).all()
    assert np.array_equal(response.behavior_entropy[mask], np.concatenate([c.entropy for c in done]))
    assert (response.behavior_entropy[~mask] == 0).all()
    assert np.array_equal(response.side.draw_ids[mask], np.concatenate([c.side.draw_ids for c in done]))
    assert np.array_equal(response.side.kept_mass[mask], np.concatenate([c.side.kept_mass for c in done]))
    assert len(response.side.draw_logprobs) == len(mask)
    check_routing(response.side.routing, [c.side.routing for c in done if len(c.token_ids)])
    assert response.side.top_ids is None
    if engine.with_logprobs:
        assert np.array_equal(response.behavior_logprobs[mask], np.concatenate([c.logprobs for c in done]))
        assert (response.behavior_logprobs[~mask] == 0).all()
        assert response.origin.role == "behavior"
    else:
        assert response.behavior_logprobs is None and response.origin is None


def check_routing(routing, recorded):
    """Every token's experts are those of the first completion that had passed it through the model."""
    assert len(routing) == len(recorded[-1])
    for position, experts in enumerate(routing):
        first = next((r for r in recorded if position < len(r) - 1), recorded[-1])
        assert np.array_equal(experts, first[position])


def check_what_was_heard(log, environment):
    """Each turn's text is its tokens, its stop token taken off, and nothing from an earlier turn."""
    turns, current = [], []
    for (kind, ids), following in zip(log[1:], [*log[2:], ("end", [])], strict=True):
        if kind == "sampled":
            current += ids.tolist()
        if kind == "sampled" and following[0] != "sampled":
            turns.append(current[:-1] if current[-1] == STOP else current)
            current = []
    assert environment.heard == [decode(turn) for turn in turns]
