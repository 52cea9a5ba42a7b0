"""The experts an engine reports are those it used: every token, every layer, the prompt included."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_contract import PROMPTS, finish, one
from tiny_models import CONFIGS, build_model, weights_of
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headway.engine.torch_engine import TorchEngine
from headway.types import Completion, Sampling

torch.set_num_threads(1)

RECORD = Sampling(max_tokens=12, seed=7, temperature=0.8, record_routing=True)


def make_engine(model: Any, **options: Any) -> TorchEngine:
    engine = TorchEngine(model.config, **{"max_slots": 3, "max_length": 64, **options})
    engine.load(weights_of(model), 0)
    return engine


def variant(**changes: Any) -> Any:
    """The mixture of experts with some settings changed."""
    config = deepcopy(CONFIGS["qwen3_moe"])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def experts_by_transformers(model: Any, tokens: np.ndarray) -> np.ndarray:
    """`[len(tokens), L, E]`, most likely first, from a hook on every router."""
    layers: list[torch.Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    handles = [r.register_forward_hook(lambda module, inputs, output: layers.append(output[2])) for r in routers]
    model(torch.from_numpy(tokens)[None].long())
    for handle in handles:
        handle.remove()
    return torch.stack(layers, 1).numpy()


def routing_of(completion: Completion) -> np.ndarray:
    assert completion.side.routing is not None
    return completion.side.routing


def assert_routing(model: Any, prompt: np.ndarray, completion: Completion) -> None:
    tokens, routing = np.concatenate([prompt, completion.token_ids]), routing_of(completion)
    expected = experts_by_transformers(model, tokens)
    assert routing.shape == expected.shape and routing.dtype == np.int8
    assert np.array_equal(routing[:-1], expected[:-1])
    assert (routing[-1] == -1).all(), "the last token never entered the model"


@pytest.mark.parametrize("sparse_step", [1, 2])
@pytest.mark.parametrize("normalize", [True, False])
def test_recorded_experts_are_those_transformers_chooses(sparse_step: int, normalize: bool):
    model = variant(decoder_sparse_step=sparse_step, norm_topk_prob=normalize)
    # Five prompts in three slots, one twice, one of a single token: refills, a shared prefill, an empty one.
    answers = make_engine(model).generate(PROMPTS, RECORD, n=2)
    for prompt, members in zip(PROMPTS, answers, strict=True):
        for answer in members:
            assert_routing(model, prompt, answer)


def test_only_those_who_ask_get_routing_and_neighbors_do_not_matter():
    model = build_model("qwen3_moe")
    engine = make_engine(model)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, replace(RECORD, seed=i, max_tokens=4 + 2 * i, record_routing=i % 2 == 1))
    done = finish(engine)
    for i, prompt in enumerate(PROMPTS):
        if i % 2:
            assert_routing(model, prompt, done[i])
        else:
            assert done[i].side.routing is None


def test_an_interrupted_request_reports_what_it_has_and_the_rest_when_continued():
    model = build_model("qwen3_moe")
    engine = make_engine(model, max_slots=1)
    whole = one(engine, PROMPTS[1], RECORD)
    engine.submit("running", PROMPTS[1], RECORD)
    engine.submit("waiting", PROMPTS[1], RECORD)
    for _ in range(4):
        engine.step()
    partial = dict(engine.interrupt())
    assert_routing(model, PROMPTS[1], partial["running"])
    assert len(partial["waiting"].token_ids) == 0 and (routing_of(partial["waiting"]) == -1).all()
    tokens = np.concatenate([PROMPTS[1], partial["running"].token_ids])
    rest = one(engine, tokens, replace(RECORD, max_tokens=8))
    assert np.array_equal(routing_of(rest), routing_of(whole))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_in_flight_leaves_the_experts_of_earlier_passes(on_update: Any):
    before, after = build_model("qwen3_moe", seed=0), build_model("qwen3_moe", seed=1)
    engine = make_engine(before, on_update=on_update)
    for i in range(2):
        engine.submit(i, PROMPTS[i], RECORD)
    for _ in range(5):
        engine.step()
    engine.load(weights_of(after), 1)
    for i, answer in finish(engine).items():
        tokens = np.concatenate([PROMPTS[i], answer.token_ids])
        passed = len(PROMPTS[i]) + 4  # the fifth token was pending when the weights changed
        routing = routing_of(answer)
        assert np.array_equal(routing[:passed], experts_by_transformers(before, tokens)[:passed])
        assert not np.array_equal(routing[:passed], experts_by_transformers(after, tokens)[:passed])
        if on_update == "recompute":
            assert np.array_equal(routing[passed:-1], experts_by_transformers(after, tokens)[passed:-1])


def test_a_model_of_many_experts_reports_them_in_a_wider_type():
    model = variant(num_experts=130, moe_intermediate_size=4)
    answer = one(make_engine(model), PROMPTS[1], RECORD)
    tokens = np.concatenate([PROMPTS[1], answer.token_ids])
    assert routing_of(answer).dtype == np.int16
    assert np.array_equal(routing_of(answer)[:-1], experts_by_transformers(model, tokens)[:-1])
