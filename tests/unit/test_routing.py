"""Replayed routing against a mixture of experts written out by hand, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headway.models.loading import load_causal_lm, named_weights, save_causal_lm
from headway.models.policy import response_logprobs
from headway.models.routing import replayed_gates, replayed_routing, routers
from headway.models.tiny import character_tokenizer, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
BATCH, WIDTH, EXPERTS, CHOSEN = 3, 5, 6, 2


def moe(*, normalize: bool = True, dtype: torch.dtype = torch.float64, **settings: Any) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        **{
            **SIZES,
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": 8,
            "norm_topk_prob": normalize,
            **settings,
        }
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    model.to(dtype).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model


def some_routing(num_layers: int, seed: int = 0) -> Tensor:
    """`[B, S, L, E]`, unlike experts for every token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(BATCH, WIDTH, num_layers, EXPERTS, generator=generator)
    return scores.topk(CHOSEN, -1).indices


def by_hand(block: Any, x: Tensor, experts: Tensor, *, normalize: bool) -> Tensor:
    """Σ_e g_e · down_e(silu(gate_e x) · up_e x), one token and one expert at a time."""
    rows = []
    for token, ids in zip(x, experts.tolist(), strict=True):
        z = block.gate.weight @ token
        among = torch.tensor([float(e in ids) for e in range(len(z))], dtype=z.dtype)
        total = ((among if normalize else torch.ones_like(z)) * z.exp()).sum()
        out = torch.zeros_like(token)
        for e in ids:
            gate, up = (block.experts.gate_up_proj[e] @ token).chunk(2)
            out = out + z[e].exp() / total * (block.experts.down_proj[e] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_replayed_layer_and_its_gradient_are_those_written_by_hand(normalize: bool):
    model = moe(normalize=normalize)
    block: Any = model.model.layers[1].mlp
    x = torch.randn(BATCH, WIDTH, 16, dtype=torch.float64)
    routing = some_routing(2)
    with replayed_routing(model, routing):
        found = block(x)
        (gradient,) = torch.autograd.grad(found.square().sum(), block.gate.weight)
    expected = by_hand(block, x.flatten(0, 1), routing[:, :, 1].flatten(0, 1), normalize=normalize)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), block.gate.weight)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert bool((gradient.abs().sum(1) > 0).all()), "every expert's router row learns from some token"


def score(model: Any, seed: int = 0) -> Tensor:
    ids = torch.randint(0, 20, (BATCH, WIDTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    return response_logprobs(model, ids, torch.ones_like(ids), mask)[0]


@pytest.mark.parametrize("normalize", [True, False])
def test_replaying_the_learners_own_choice_changes_nothing(normalize: bool):
    model = moe(normalize=normalize, dtype=torch.float32)
    own: list[Tensor] = []
    handles = [r.register_forward_hook(lambda _, inputs, output: own.append(output[2])) for r in routers(model)]
    plain = score(model)
    for handle in handles:
        handle.remove()
    routing = torch.stack(own, 1).view(BATCH, WIDTH, 2, CHOSEN)
    with replayed_routing(model, routing) as replay:
        replayed = score(model)
    torch.testing.assert_close(replayed, plain, rtol=0, atol=1e-6)
    assert replay.counts() == (2 * BATCH * WIDTH, 2 * BATCH * WIDTH)
    # The order in which a token's experts are named says nothing.
    with replayed_routing(model, routing.flip(-1)) as replay:
        torch.testing.assert_close(score(model), plain, rtol=0, atol=1e-6)
    assert replay.counts()[0] == 2 * BATCH * WIDTH


def test_other_experts_change_the_log_probs_until_the_context_ends():
    model = moe()
    plain = score(model)
    with replayed_routing(model, some_routing(2)):
        replayed = score(model)
    assert (replayed - plain).abs().max() > 1e-3
    assert torch.equal(score(model), plain)


def test_tokens_without_a_record_are_routed_by_the_model_itself():
    model = moe()
    plain = score(model)
    with replayed_routing(model, torch.full((BATCH, WIDTH, 2, CHOSEN), -1)) as replay:
        torch.testing.assert_close(score(model), plain, rtol=0, atol=1e-6)
    assert replay.counts() == (0, 0)


def test_gates_of_experts_that_the_learner_finds_impossible_are_finite_and_learn():
    logits = torch.tensor([[1e4, 0.0, -3.0]], requires_grad=True)
    gates = replayed_gates(logits, torch.tensor([[1, 2]]), renormalize=True)
    torch.testing.assert_close(gates, torch.softmax(torch.tensor([[0.0, -3.0]]), -1))
    gates[0, 0].backward()
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all()) and logits.grad[0, 1] > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_gradient_checkpointing_runs_the_layers_again_with_the_same_experts():
    gradients = []
    for checkpointing in (False, True):
        model = moe()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        with replayed_routing(model, some_routing(2)) as replay:
            score(model).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert replay.counts()[1] == 2 * BATCH * WIDTH
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(BATCH, WIDTH, 3, CHOSEN), (BATCH, WIDTH, 2, 1), (BATCH, WIDTH, 2)])
def test_routing_of_another_shape_than_the_models_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="routing of shape"), replayed_routing(moe(), torch.zeros(shape).long()):
        pass


def test_routing_of_other_tokens_than_the_inputs_is_refused():
    model = moe()
    with (
        replayed_routing(model, some_routing(2)[:, :-1]),
        pytest.raises(ValueError, match="covers 12 tokens"),
    ):
        score(model)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="routing_replay = false"):
        routers(Qwen3ForCausalLM(Qwen3Config(**SIZES)))


def test_a_saved_mixture_of_experts_comes_back_bit_by_bit_and_under_the_same_names(tmp_path: Path):
    # More than ten experts: on disk each has a name of its own, and 10 sorts before 2.
    model = moe(dtype=torch.float32, num_experts=12)
    saved = named_weights(model)
    loaded = named_weights(load_causal_lm(save_causal_lm(model, character_tokenizer(), tmp_path)))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_the_tiny_mixture_of_experts_routes_to_two_of_eight_in_every_layer():
    model: Any = tiny_model("moe")
    assert [(r.top_k, r.num_experts) for r in routers(model)] == [(2, 8)] * 4
    again: Any = tiny_model("moe")
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
