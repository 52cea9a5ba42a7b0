"""What every engine owes its callers; the built-in one is checked against transformers on the same weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CONFIGS,
    VOCAB,
    build_model,
    greedy_by_transformers,
    logprobs_by_transformers,
    weights_of,
)
from transformers import GPT2Config, Qwen3Config

from headway.engine import decoder
from headway.engine.torch_engine import TorchEngine
from headway.protocols import NotFinite, WeightsRefused
from headway.types import Completion, Sampling

torch.set_num_threads(1)

MakeEngine = Callable[..., TorchEngine]
WAYS_TO_ATTEND = {"by the kernel": True, "in padded products": False}
PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3], [1, 2, 3], [11, 12])]
PLAIN = Sampling(max_tokens=12, seed=7, temperature=0.8)


@pytest.fixture(params=WAYS_TO_ATTEND)
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Builds an engine under test, already holding the model's weights as version 0."""
    torch.set_num_threads(1)
    by_kernel = WAYS_TO_ATTEND[request.param]
    if not by_kernel:  # as on other devices, in other dtypes
        monkeypatch.setattr(decoder, "attends_by_kernel", lambda *_: False)

    def make(model: Any, **options: Any) -> TorchEngine:
        settings: dict[str, Any] = {"max_slots": 3, "max_length": 64} | options
        engine = TorchEngine(model.config, **settings)
        assert (engine._decoder._kernel is not None) == (by_kernel and engine._arch.head_dim % 4 == 0)
        engine.load(weights_of(model), 0)
        return engine

    return make


def finish(engine: TorchEngine) -> dict[Any, Completion]:
    done: dict[Any, Completion] = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def one(engine: TorchEngine, prompt: np.ndarray, sampling: Sampling) -> Completion:
    return engine.generate([prompt], sampling)[0][0]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_those_of_transformers_generate(make_engine: MakeEngine, name: str):
    model = build_model(name)
    answers = make_engine(model).generate(PROMPTS, Sampling(max_tokens=12, temperature=0.0))
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids.tolist() == greedy_by_transformers(model, prompt, 12)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_and_entropy_equal_a_transformers_forward(make_engine: MakeEngine, name: str, temperature: float):
    model = build_model(name)
    sampling = Sampling(max_tokens=15, seed=3, temperature=temperature, num_draws=5, num_top=4)
    answers = make_engine(model).generate(PROMPTS, sampling, n=2)
    for prompt, members in zip(PROMPTS, answers, strict=True):
        for answer in members:
            full = logprobs_by_transformers(model, prompt, answer.token_ids, temperature)
            close_to(answer.logprobs, full.gather(-1, torch.from_numpy(answer.token_ids)[:, None].long())[:, 0])
            close_to(answer.entropy, -(full.exp() * full).sum(-1))
            close_to(answer.side.top_logprobs, full.topk(4).values)
            assert answer.side.draw_ids is not None and answer.side.draw_ids.shape == (15, 5)
            close_to(answer.side.draw_logprobs, full.gather(-1, torch.from_numpy(answer.side.draw_ids).long()))
            assert answer.side.kept_mass is None


def close_to(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)


def test_truncated_logprobs_belong_to_the_truncated_distribution(make_engine: MakeEngine):
    model = build_model()
    sampling = Sampling(max_tokens=12, seed=1, temperature=0.9, top_p=0.8, top_k=10)
    for prompt, (answer,) in zip(PROMPTS, make_engine(model).generate(PROMPTS, sampling), strict=True):
        full = logprobs_by_transformers(model, prompt, answer.token_ids, 0.9)
        plain = full.gather(-1, torch.from_numpy(answer.token_ids)[:, None].long())[:, 0]
        assert answer.logprobs is not None and answer.side.kept_mass is not None
        kept = torch.from_numpy(answer.side.kept_mass)
        close_to(answer.logprobs, plain - kept.log())
        assert bool(((kept > 0) & (kept < 1)).all())


def test_tokens_do_not_depend_on_neighbors_or_slots_or_arrival(make_engine: MakeEngine):
    model = build_model()
    alone = [one(make_engine(model), p, replace(PLAIN, seed=i)) for i, p in enumerate(PROMPTS)]
    engine, done = make_engine(model, max_slots=2), {}
    for i in reversed(range(len(PROMPTS))):
        engine.submit(i, PROMPTS[i], replace(PLAIN, seed=i))
        engine.submit(("neighbor", i), PROMPTS[i], Sampling(max_tokens=3 + i, seed=99, num_draws=4, top_p=0.5))
        done.update(engine.step())
        done.update(engine.step())
    done.update(finish(engine))
    for i, expected in enumerate(alone):
        same_tokens(done[i], expected)


def same_tokens(found: Completion, expected: Completion) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs is not None and expected.logprobs is not None
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def test_samples_of_one_prompt_differ_and_repeat_by_seed(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=4)
    members = engine.generate([PROMPTS[1]], PLAIN, n=6)[0]
    assert len({tuple(m.token_ids.tolist()) for m in members}) == 6
    for j, member in enumerate(members):
        same_tokens(one(engine, PROMPTS[1], replace(PLAIN, seed=PLAIN.seed + j)), member)


def test_a_stop_token_is_part_of_the_response_and_ends_it(make_engine: MakeEngine):
    model = build_model()
    tokens = one(make_engine(model), PROMPTS[0], PLAIN).token_ids.tolist()
    stop = tokens[5]
    stopped = one(make_engine(model), PROMPTS[0], replace(PLAIN, stop_token_ids=(VOCAB - 1, stop)))
    assert stopped.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_in_flight_is_recorded_token_by_token(make_engine: MakeEngine, on_update: str):
    before, after = build_model(seed=0), build_model(seed=1)
    engine = make_engine(before, on_update=on_update)
    for i in range(2):
        engine.submit(i, PROMPTS[i], PLAIN)
    for _ in range(5):
        engine.step()
    engine.load(weights_of(after), 1)
    unchanged = one(make_engine(before), PROMPTS[0], PLAIN)
    done = finish(engine)
    for i in range(2):
        assert done[i].versions.tolist() == [0] * 5 + [1] * 7
    assert done[0].token_ids[:5].tolist() == unchanged.token_ids[:5].tolist()
    rest = logprobs_by_transformers(after, PROMPTS[1], done[1].token_ids, PLAIN.temperature)[5:]
    chosen = rest.gather(-1, torch.from_numpy(done[1].token_ids[5:])[:, None].long())[:, 0]
    assert done[1].logprobs is not None
    distance = (torch.from_numpy(done[1].logprobs[5:]) - chosen).abs().max()
    assert (distance < 1e-5) == (on_update == "recompute")


def test_a_prompt_after_an_update_meets_no_older_keys(make_engine: MakeEngine):
    before, after = build_model(seed=0), build_model(seed=1)
    engine = make_engine(before)
    engine.submit("first", PROMPTS[0], PLAIN)
    engine.step()
    engine.load(weights_of(after), 1)
    engine.submit("same prompt", PROMPTS[0], PLAIN)
    fresh = one(make_engine(after), PROMPTS[0], PLAIN)
    same_tokens(finish(engine)["same prompt"], fresh)


def test_an_interrupted_request_continues_to_the_same_tokens(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=2)
    whole = one(engine, PROMPTS[1], PLAIN)
    for i in range(3):
        engine.submit(i, PROMPTS[1], PLAIN)
    for _ in range(4):
        engine.step()
    partial = dict(engine.interrupt())
    assert [len(partial[i].token_ids) for i in range(3)] == [4, 4, 0]
    assert {p.finish_reason for p in partial.values()} == {"interrupt"}
    assert not engine.has_work and engine.step() == []
    longer = np.concatenate([PROMPTS[1], partial[0].token_ids])
    rest = one(engine, longer, replace(PLAIN, max_tokens=PLAIN.max_tokens - 4))
    assert [*partial[0].token_ids, *rest.token_ids] == whole.token_ids.tolist()


def test_a_cancelled_request_never_answers_and_frees_its_slot(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=2)
    expected = one(engine, PROMPTS[1], PLAIN)
    for i in range(4):
        engine.submit(i, PROMPTS[1], PLAIN)
    engine.step()
    engine.cancel(0)
    engine.cancel(3)
    engine.cancel("never seen")
    done = finish(engine)
    assert sorted(done) == [1, 2]
    same_tokens(done[1], expected)
    same_tokens(done[2], expected)


def test_an_urgent_request_takes_the_next_free_slot(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=1)
    for name in ("running", "waiting", "waiting too"):
        engine.submit(name, np.array([5, 6], np.int32), Sampling(max_tokens=2))
    engine.step()
    engine.submit("urgent", np.array([5, 6], np.int32), Sampling(max_tokens=2, priority=-1))
    order = [name for _ in range(8) for name, _ in engine.step()]
    assert order == ["running", "urgent", "waiting", "waiting too"]


def test_slots_are_refilled_the_step_after_they_fall_free(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=2)
    for i, length in enumerate((1, 3, 1, 1)):
        engine.submit(i, PROMPTS[0], replace(PLAIN, max_tokens=length))
    assert [sorted(id for id, _ in engine.step()) for _ in range(3)] == [[0], [2], [1, 3]]
    assert engine.status.num_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], PLAIN, "one or more token ids"),
        ([1, VOCAB], PLAIN, f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], PLAIN, "token id -1"),
        ([1] * 60, PLAIN, "max_length of 64"),
        ([1], replace(PLAIN, max_tokens=0), "max_tokens"),
        ([1], replace(PLAIN, temperature=-1.0), "temperature"),
        ([1], replace(PLAIN, temperature=float("nan")), "temperature"),
        ([1], replace(PLAIN, top_p=0.0), "top_p"),
        ([1], replace(PLAIN, top_k=-1), "top_k"),
        ([1], replace(PLAIN, num_top=VOCAB + 1), "num_top"),
        ([1], replace(PLAIN, stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], replace(PLAIN, record_routing=True), "record_routing needs a mixture of experts"),
    ],
)
def test_a_bad_request_is_refused_by_name(make_engine: MakeEngine, prompt: list[int], sampling: Sampling, message: str):
    engine = make_engine(build_model())
    with pytest.raises(ValueError, match=message) as refusal:
        engine.submit("r1", np.array(prompt, np.int32), sampling)
    assert "'r1'" in str(refusal.value)
    assert not engine.has_work


def test_weights_that_did_not_arrive_whole_are_refused_and_the_previous_stay(make_engine: MakeEngine):
    model = build_model()
    engine, good = make_engine(model), weights_of(model)
    name = "model.layers.1.mlp.up_proj.weight"
    poisoned = good[name].clone()
    poisoned[3, 4] = torch.inf
    for bad in (
        {k: v for k, v in good.items() if k != name},
        good | {name: good[name].T},
        good | {name: poisoned},
    ):
        with pytest.raises(WeightsRefused, match=name.replace(".", r"\.")):
            engine.load(bad, 1)
    with pytest.raises(WeightsRefused, match="unexpected_name"):
        engine.load(good | {"unexpected_name": poisoned}, 1)
    assert engine.version == 0
    assert one(engine, PROMPTS[0], PLAIN).versions.tolist() == [0] * 12


def test_output_that_is_not_finite_is_reported_and_does_not_outlive_its_requests(make_engine: MakeEngine):
    model = build_model()
    engine = make_engine(model)
    expected = one(engine, PROMPTS[1], PLAIN)
    overflowing = weights_of(model) | {"model.norm.weight": torch.full((32,), 3e38)}
    engine.load(overflowing, 1)
    engine.submit("r1", PROMPTS[1], PLAIN)
    with pytest.raises(NotFinite, match=r"'r1'.*version 1"):
        engine.step()
    assert engine.clear() == ["r1"]
    engine.load(weights_of(model), 2)
    same_tokens(one(engine, PROMPTS[1], PLAIN), expected)


def test_an_engine_can_withhold_logprobs(make_engine: MakeEngine):
    model = build_model()
    bare = one(make_engine(model, record_logprobs=False), PROMPTS[0], PLAIN)
    assert bare.logprobs is None and bare.entropy is None
    assert bare.token_ids.tolist() == one(make_engine(model), PROMPTS[0], PLAIN).token_ids.tolist()


def test_prompts_beyond_the_prefill_budget_are_split_without_a_difference(make_engine: MakeEngine):
    model = build_model()
    usual = make_engine(model, max_slots=5).generate(PROMPTS, PLAIN)
    split = make_engine(model, max_slots=5, prefill_tokens=4).generate(PROMPTS, PLAIN)
    for (expected,), (found,) in zip(usual, split, strict=True):
        same_tokens(found, expected)


def test_what_the_engine_cannot_compute_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'gpt2' is not supported.*qwen3"):
        TorchEngine(GPT2Config(), max_slots=1, max_length=8)
    slides = Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding-window"):
        TorchEngine(slides, max_slots=1, max_length=8)
    dynamic = Qwen3Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=r"'dynamic' is not supported.*yarn"):
        TorchEngine(dynamic, max_slots=1, max_length=8)


@pytest.mark.parametrize("ends", ["step", "cancel", "interrupt"])
def test_time_with_unfinished_requests_is_busy_and_no_other(make_engine: MakeEngine, ends: str):
    engine = make_engine(build_model())
    assert engine.status.busy_s == 0
    counted = 0.0
    for _ in range(2):  # what was counted before is kept
        for name in ("a", "b"):
            engine.submit(name, PROMPTS[0], PLAIN)
        engine.cancel("b")  # one of two: there is work left
        waited = engine.status.busy_s
        assert counted < waited < engine.status.busy_s
        if ends == "step":
            finish(engine)
        elif ends == "cancel":
            engine.cancel("a")
        else:
            engine.interrupt()
        ended = engine.status
        assert waited < ended.busy_s == engine.status.busy_s < ended.up_s
        counted = ended.busy_s


def test_steps_that_a_request_joined_are_told_from_those_none_did(make_engine: MakeEngine):
    engine = make_engine(build_model(), max_slots=2)
    for i, num in enumerate((3, 5, 4)):  # the third joins when the first has ended, in the fourth step
        engine.submit(i, PROMPTS[i], Sampling(max_tokens=num, seed=i))
    finish(engine)
    status = engine.status
    # The first and the fourth are joined; the last two have one request left.
    assert (status.num_steps, status.num_plain_steps, status.num_plain_tokens) == (7, 5, 2 + 2 + 2 + 1 + 1)
    assert 0 < status.plain_s < status.busy_s


@pytest.mark.parametrize(
    ("name", "dtype", "num_threads", "by_kernel"),
    [
        ("qwen3", torch.float32, 1, True),
        ("qwen3", torch.bfloat16, 1, False),
        ("qwen3", torch.float32, 2, False),
        ("qwen3, heads of 6", torch.float32, 1, False),
    ],
)
def test_the_kernel_serves_one_thread_in_float32_and_heads_it_can_divide(
    name: str, dtype: torch.dtype, num_threads: int, by_kernel: bool
):
    torch.set_num_threads(num_threads)
    try:
        model = build_model(name)
        engine = TorchEngine(model.config, max_slots=2, max_length=32, dtype=dtype)
        engine.load(weights_of(model), 0)
        assert len(one(engine, PROMPTS[0], PLAIN).token_ids) == PLAIN.max_tokens
    finally:
        torch.set_num_threads(1)
    assert (engine._decoder._kernel is not None) == by_kernel
