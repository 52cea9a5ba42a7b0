import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted import Script, ScriptedEngine, TextEnvironment, completion

from headway.envs.turns import Turn
from headway.rollout import BadCompletion, EnvironmentFailed, run_episode
from headway.types import Completion, Prompt, Response, Sampling, SideData

PROMPT = Prompt(7, "train", np.array([1, 2, 3], np.int32))
STOP = 0


def play(script: Script, turns: Callable[[str], Turn] | None = None, **limits: Any) -> Response:
    options: dict[str, Any] = {"max_response_tokens": 20, "max_turns": 4, "max_tokens": 10} | limits
    sampling = Sampling(max_tokens=options.pop("max_tokens"), stop_token_ids=(STOP,), seed=5)
    return asyncio.run(
        run_episode(
            ScriptedEngine(script),
            TextEnvironment(turns or (lambda text: Turn(1.0))),
            PROMPT,
            sampling,
            decode=lambda ids: "".join(map(chr, ids)),
            **options,
        )
    )


def test_one_turn_keeps_its_stop_token_and_hides_it_from_the_environment():
    heard = []
    response = play([completion([65, 66, STOP], [3, 3, 4])], lambda text: heard.append(text) or Turn(0.5))
    assert heard == ["AB"]
    assert response.token_ids.tolist() == [65, 66, STOP]
    assert response.versions.tolist() == [3, 3, 4]
    assert response.reward == 0.5 and not response.truncated and response.num_turns == 1
    assert response.origin is not None and response.origin.engine == "scripted"


def test_an_interrupted_turn_goes_on_from_its_own_tokens_with_what_is_left_of_the_limit():
    script = [
        completion([65, 66], [0, 0], "interrupt"),
        completion([], [], "interrupt"),
        completion([67, STOP], [2, 2]),
    ]
    engine = ScriptedEngine(script)
    environment = TextEnvironment(lambda text: Turn(float(text == "ABC")))
    response = asyncio.run(
        run_episode(
            engine,
            environment,
            PROMPT,
            Sampling(max_tokens=5, stop_token_ids=(STOP,), seed=9),
            decode=lambda ids: "".join(map(chr, ids)),
            max_response_tokens=20,
            max_turns=1,
        )
    )
    assert response.reward == 1.0 and response.versions.tolist() == [0, 0, 2, 2]
    assert [request.tolist() for request, _ in engine.requests] == [[1, 2, 3], [1, 2, 3, 65, 66], [1, 2, 3, 65, 66]]
    assert [sampling.max_tokens for _, sampling in engine.requests] == [5, 3, 3]
    assert {sampling.seed for _, sampling in engine.requests} == {9}


def test_an_interruption_at_the_very_limit_ends_the_turn():
    response = play([completion([65, 66], [0, 0], "interrupt")], max_tokens=2)
    assert response.truncated and response.num_sampled == 2


def test_tool_output_is_masked_and_versionless():
    def tool(text: str) -> Turn:
        return Turn(0.0, "42") if text == "?" else Turn(1.0)

    response = play([completion([63, STOP], [4, 4]), completion([65, STOP], [5, 5])], tool)
    assert response.token_ids.tolist() == [63, STOP, *b"42", 65, STOP]
    assert response.mask.tolist() == [True, True, False, False, True, True]
    assert response.versions.tolist() == [4, 4, -1, -1, 5, 5]
    assert response.behavior_logprobs is not None and response.behavior_logprobs[2:4].tolist() == [0, 0]
    assert response.reward == 1.0 and response.num_turns == 2


def test_an_observation_that_leaves_no_room_ends_the_episode_truncated():
    response = play([completion([65, STOP], [0, 0])], lambda text: Turn(0.25, "x" * 18))
    assert response.truncated and response.token_ids.tolist() == [65, STOP] and response.reward == 0.25


def test_a_turn_cut_at_its_own_limit_is_followed_by_the_next_one():
    script = [completion([65, 66], [0, 0], "length"), completion([67, STOP], [0, 0])]
    response = play(script, lambda text: Turn(0.0, "-") if text == "AB" else Turn(1.0), max_tokens=2)
    assert response.token_ids.tolist() == [65, 66, ord("!"), ord("-"), 67, STOP]  # "!" closes an open message
    assert not response.truncated


def test_an_engine_out_of_context_ends_the_episode():
    response = play([completion([65], [0], "length")], lambda text: Turn(0.0, "more"))
    assert response.truncated and response.num_turns == 1


def test_the_last_turn_ends_the_episode_though_a_tool_has_answered():
    response = play([completion([65, STOP], [0, 0])] * 2, lambda text: Turn(0.0, "go on"), max_turns=2)
    assert response.num_turns == 2 and response.mask[-1] and not response.truncated


BAD = [
    (completion([65, 66, STOP], [0, 0]), "3 tokens but 2 versions"),
    (completion([65, STOP], [0, -1]), "version -1"),
    (completion([65, STOP], [1, 0]), "backwards"),
    (completion([65, STOP], [0, 0], logprobs=[-1.0, np.nan]), "log-prob nan of token 1"),
    (completion([65, STOP], [0, 0], logprobs=[-1.0, 0.1]), "log-prob 0.1"),
    (completion([65, STOP], [0, 0], logprobs=[-np.inf, 0.0]), "log-prob -inf of token 0"),
    (completion([65, STOP], [0, 0], logprobs=[-1.0]), "2 tokens but 1 logprobs"),
    (completion([], [], "stop"), "no token came back"),
    (completion([65] * 11, [0] * 11, "length"), "at most 10"),
    (completion([65, STOP], [0, 0], side=SideData(draw_ids=np.zeros((3, 2), np.int32))), "3 draw_ids"),
    (completion([65, STOP], [0, 0], side=SideData(routing=np.zeros((2, 1, 1), np.int32))), r"2 rows for 3 \+ 2"),
]


@pytest.mark.parametrize(("bad", "complaint"), BAD)
def test_a_broken_completion_is_refused_by_sample_and_engine(bad: Completion, complaint: str):
    with pytest.raises(BadCompletion, match=rf"prompt train/7 on engine 'scripted'.*{complaint}"):
        play([bad])


def test_logprobs_in_some_completions_only_are_refused():
    script = [completion([65], [0], "interrupt"), completion([STOP], [0], logprobs=None)]
    with pytest.raises(BadCompletion, match="only 1 of 2 completions carry logprobs"):
        play(script)


def test_an_empty_interruption_says_nothing_about_logprobs():
    script = [completion([], [], "interrupt", logprobs=None), completion([65, STOP], [0, 0])]
    response = play(script)
    assert response.behavior_logprobs is not None and len(response.behavior_logprobs) == 2


def test_an_engine_without_logprobs_gives_a_response_without_them():
    response = play([completion([65, STOP], [0, 0], logprobs=None)])
    assert response.behavior_logprobs is None and response.origin is None


def test_an_environment_that_raises_is_named_with_its_error():
    def broken(text: str) -> Turn:
        raise KeyError("answer")

    with pytest.raises(EnvironmentFailed, match=r"prompt train/7.*KeyError") as failure:
        play([completion([65, STOP], [0, 0])], broken)
    assert isinstance(failure.value.__cause__, KeyError)


def test_limits_below_one_are_refused():
    with pytest.raises(ValueError, match="max_turns=0"):
        play([], max_turns=0)
