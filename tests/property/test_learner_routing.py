"""A learner that replays routing: what it refuses, and what its step does not depend on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import CONFIG, assert_same, batch, parameters_after
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headway.training.learner import TorchLearner
from headway.training.objectives import PolicyObjective
from headway.training.routing import RoutingMismatch
from headway.types import Batch, Response

LAYERS, CHOSEN, EXPERTS = 2, 2, 5
_SIZES: dict[str, Any] = {  # head_dim reaches the configuration, though its signature does not name it
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
MOE = Qwen3MoeConfig(**_SIZES)


def learner(*, replay: bool = True, config: Any = MOE, **options: Any) -> TorchLearner:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = Qwen3MoeForCausalLM(config) if config is MOE else Qwen3ForCausalLM(config)
    if config is MOE:
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    settings: dict[str, Any] = {
        "objective": PolicyObjective("sat_gspo", {"scope": "batch"}),
        "temperature": 1.0,
        "learning_rate": lambda step: 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_cosine": False,
        "micro_batch_tokens": 10_000,
        "pad_id": 0,
        "autocast": torch.float32,
        "save_model": lambda directory: None,
    }
    return TorchLearner(model.double(), **{**settings, **options}, routing_replay=replay)


def routed_batch(seed: int) -> Batch:
    """Random experts for every token of prompt and response, none for the last."""
    rng = np.random.default_rng(seed)

    def route(response: Response, num_prompt: int) -> Response:
        shape = (num_prompt + len(response.token_ids), LAYERS, EXPERTS)
        routing = rng.random(shape).argsort(-1)[..., :CHOSEN].astype(np.int8)
        routing[-1] = -1
        return replace(response, side=replace(response.side, routing=routing))

    return change(batch(seed), route)


def change(given: Batch, how: Callable[[Response, int], Response]) -> Batch:
    groups = [
        replace(g, responses=tuple(how(response, len(g.prompt.token_ids)) for response in g.responses))
        for g in given.groups
    ]
    return replace(given, groups=tuple(groups))


def after(one: TorchLearner, given: Batch) -> tuple[dict[str, torch.Tensor], float]:
    one.accumulate(given)
    agreement = one._accumulated.metrics.get("routing_agreement", -1.0)  # pyright: ignore[reportOptionalMemberAccess]
    return parameters_after(one, given), agreement


@pytest.mark.parametrize("algorithm", ["sat_gspo", "grpo"])
def test_the_step_does_not_depend_on_the_micro_batch_split(algorithm: str):
    params = {"scope": "batch"} if algorithm == "sat_gspo" else {}
    options: dict[str, Any] = {"objective": PolicyObjective(algorithm, params)}
    whole, agreement = after(learner(**options), routed_batch(1))
    split, split_agreement = after(learner(micro_batch_tokens=12, **options), routed_batch(1))
    assert_same(whole, split)
    assert 0 < agreement == split_agreement < 1


def test_the_recorded_experts_are_what_trains():
    replayed, _ = after(learner(), routed_batch(1))
    plain, agreement = after(learner(replay=False), routed_batch(1))
    assert agreement == -1, "no agreement is reported without replay"
    assert max(float((replayed[name] - plain[name]).abs().max()) for name in plain) > 1e-3


def test_with_the_learners_own_experts_replay_trains_the_same_step():
    own = learner(replay=False)
    given = batch(1)
    layers: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, inputs, output: layers.append(output[2]))
        for layer in own.model.model.layers
    ]
    routed = []
    for group in given.groups:
        members = []
        for response in group.responses:
            tokens = np.concatenate([group.prompt.token_ids, response.token_ids])
            layers.clear()
            with torch.no_grad():
                own.model(torch.from_numpy(tokens)[None].long())
            routing = torch.stack(layers, 1).numpy().astype(np.int8)
            routing[-1] = -1
            members.append(replace(response, side=replace(response.side, routing=routing)))
        routed.append(replace(group, responses=tuple(members)))
    for hook in hooks:
        hook.remove()
    given = replace(given, groups=tuple(routed))
    replayed, agreement = after(learner(), given)
    plain, _ = after(own, given)
    assert agreement == 1
    for name, tensor in plain.items():
        # transformers takes the softmax of a float64 router in float32, replay does not.
        torch.testing.assert_close(replayed[name], tensor, rtol=0, atol=1e-4)


def spoiled(routing: Any) -> Callable[[Response, int], Response]:
    """Changes the routing of one member: the second of group 2, told by its reward's place in the batch."""
    seen = 0

    def spoil(response: Response, num_prompt: int) -> Response:
        nonlocal seen
        seen += 1
        if seen != 2 * 4 + 2:
            return response
        assert response.side.routing is not None
        return replace(response, side=replace(response.side, routing=routing(response.side.routing.copy())))

    return spoil


def twice(routing: np.ndarray) -> np.ndarray:
    routing[0, 1] = 3
    return routing


def outside(routing: np.ndarray) -> np.ndarray:
    routing[0, 1, 0] = EXPERTS
    return routing


def unrecorded(routing: np.ndarray) -> np.ndarray:
    routing[1] = -1
    return routing


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (lambda r: None, "no routing was recorded"),
        (lambda r: r[:-1], r"routing of shape .* for \d+ prompt \+ \d+ response tokens"),
        (lambda r: np.concatenate([r, r[-1:]]), r"routing of shape .* for \d+ prompt \+ \d+ response tokens"),
        (lambda r: r[:, :1], r"layers, experts per token\) \(2, 2\)"),
        (lambda r: r[:, :, :1], r"layers, experts per token\) \(2, 2\)"),
        (outside, "expert outside 0 … 4"),
        (unrecorded, "no experts recorded for token 1"),
        (twice, "names an expert twice"),
    ],
)
def test_routing_that_does_not_fit_is_refused_with_the_sample_named(routing: Any, message: str):
    one = learner()
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    with pytest.raises(RoutingMismatch, match=f"^group 2, member 1: .*{message}"):
        one.train(change(routed_batch(1), spoiled(routing)))
    assert_same(before, dict(one.weights()))


def test_a_dense_model_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no such router"):
        learner(config=CONFIG)
