import asyncio
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedEngine, TextEnvironment, completion

from headway.envs.turns import Turn
from headway.protocols import EngineDied
from headway.rollout import BadCompletion, EnvironmentFailed, EpisodeFailed, run_group, sample_seed
from headway.types import Completion, Group, Ints, Prompt, Sampling

PROMPT = Prompt(7, "train", np.array([1, 2, 3], np.int32))
ANSWER = completion([65, 0], [0, 0])


class Engines(ScriptedEngine):
    """Hands itself out; answers by seed, so each member can be told what to do."""

    def __init__(self, by_member: dict[int, list[Any]]) -> None:
        super().__init__([])
        self.scripts = {sample_seed(1, 12, m): list(steps) for m, steps in by_member.items()}
        self.num_picked = 0

    async def pick(self) -> "Engines":
        self.num_picked += 1
        return self

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        self.requests.append((token_ids, sampling))
        step = self.scripts[sampling.seed].pop(0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await asyncio.sleep(step)
            return await self.generate(token_ids, sampling)
        return step


class Told:
    def __init__(self) -> None:
        self.finished: list[int] = []
        self.discarded: list[tuple[int, int]] = []
        self.num_tokens = 0

    def count(self, num: int) -> None:
        self.num_tokens += num


def run(engines: Engines, told: Told | None = None, answer=lambda text: Turn(1.0), **options: Any) -> Group:
    told = told or Told()
    options.setdefault("group_size", len(engines.scripts))
    return asyncio.run(
        run_group(
            12,
            PROMPT,
            environment=TextEnvironment(answer),
            pick_engine=engines.pick,
            sampling=Sampling(max_tokens=4, stop_token_ids=(0,)),
            run_seed=1,
            decode=lambda ids: "".join(map(chr, ids)),
            max_response_tokens=8,
            max_turns=2,
            on_finish=lambda member, _: told.finished.append(member),
            on_discard=lambda member, num: told.discarded.append((member, num)),
            on_tokens=told.count,
            **options,
        )
    )


def test_members_run_side_by_side_and_each_is_reported_when_it_ends():
    told = Told()
    group = run(Engines({0: [0.05, ANSWER], 1: [ANSWER], 2: [0.02, ANSWER]}), told)
    assert told.finished == [1, 2, 0]
    assert told.num_tokens == 6 and not told.discarded
    assert group.group_id == 12 and group.rewards == [1.0, 1.0, 1.0]


def test_a_dead_engine_costs_no_attempt_and_its_tokens_are_reported():
    told, partial = Told(), completion([66, 67], [0, 0], "interrupt")
    engines = Engines({0: [partial, EngineDied("gone"), EngineDied("again"), ANSWER], 1: [ANSWER]})
    assert run(engines, told).responses[0].token_ids.tolist() == [65, 0]
    assert told.discarded == [(0, 2)]
    assert engines.num_picked == 4
    assert told.num_tokens == 6


def test_a_faulty_environment_is_tried_again_with_the_same_seed():
    told, faults = Told(), iter([OSError("tool is away")])

    def flaky(text: str) -> Turn:
        for fault in faults:
            raise fault
        return Turn(1.0)

    engines = Engines({0: [ANSWER, ANSWER]})
    assert run(engines, told, flaky, attempts=2).rewards == [1.0]
    assert told.discarded == [(0, 2)]
    assert len({sampling.seed for _, sampling in engines.requests}) == 1


def test_a_member_that_never_succeeds_fails_the_group_by_name_and_cancels_the_others():
    told = Told()

    def broken(text: str) -> Turn:
        raise OSError("tool is away")

    engines = Engines({0: [ANSWER] * 3, 1: [completion([66], [0], "interrupt"), 60.0]})
    with pytest.raises(EpisodeFailed, match=r"group 12, member 0.*prompt train/7.*tool is away") as failure:
        run(engines, told, broken, attempts=3)
    assert (failure.value.group_id, failure.value.member) == (12, 0)
    assert isinstance(failure.value.cause, EnvironmentFailed)
    assert isinstance(failure.value.__cause__, EnvironmentFailed)
    assert sorted(told.discarded) == [(0, 2), (0, 2), (0, 2), (1, 1)]
    assert told.num_tokens == 7 and not told.finished


def test_an_episode_beyond_its_time_limit_is_named_with_the_knob():
    told = Told()
    with pytest.raises(EpisodeFailed, match=r"member 1 \(prompt train/7\) took longer than episode_timeout_s = 0.05"):
        run(Engines({0: [ANSWER], 1: [60.0]}), told, episode_timeout_s=0.05)
    assert told.finished == [0]


def test_endless_interruptions_end_at_the_time_limit():
    empty = completion([], [], "interrupt")
    with pytest.raises(EpisodeFailed, match="episode_timeout_s"):
        run(Engines({0: [empty] * 1_000_000}), episode_timeout_s=0.05)


def test_only_the_members_that_are_missing_run():
    whole = run(Engines({m: [ANSWER] for m in range(3)}))
    told, engines = Told(), Engines({1: [ANSWER]})
    group = run(engines, told, group_size=3, finished={0: whole.responses[0], 2: whole.responses[2]})
    assert told.finished == [1] and len(engines.requests) == 1
    assert group.responses[0] is whole.responses[0] and group.responses[2] is whole.responses[2]


def test_a_broken_engine_is_not_tried_again():
    with pytest.raises(BadCompletion, match="group 12, member 0"):
        run(Engines({0: [completion([65, 0], [0])]}), attempts=5)


def test_nonsense_sizes_are_refused():
    with pytest.raises(ValueError, match="attempts=0"):
        run(Engines({0: [ANSWER]}), attempts=0)
