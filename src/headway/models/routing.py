"""Routing replay (R3, 2510.11370): the learner's mixture-of-experts layers take the experts that the engine took.

Engine and learner compute router logits with unlike rounding, or with unlike weights. Where two experts are nearly
level they then choose differently, and the log-prob of the token jumps. With replay the choice is the engine's, and the
gates are the learner's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

NOT_RECORDED = -1
"""Stands for an expert where nothing was recorded: padding, and the last token of a sequence."""


def replayed_gates(router_logits: Tensor, experts: Tensor, *, renormalize: bool) -> Tensor:
    """Gates of given experts: `g_e = I_e exp(z_e) / Σ_j I_j exp(z_j)`, in float32 or better.

    router_logits z `[N, num_experts]`, experts `[N, E]` (I is 1 on these) → `[N, E]`. Without `renormalize`, for models
    whose gates are shares of all experts (`norm_topk_prob = false`), the sum runs over all j: replay takes the choice
    from the engine and nothing else. Gradient: through z, exact. 2510.11370.
    """
    logits = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    if renormalize:
        # The softmax of the chosen logits alone stays finite however unlikely the learner finds them.
        return logits.gather(-1, experts).softmax(-1)
    return logits.softmax(-1).gather(-1, experts)


@dataclass(slots=True)
class Replay:
    """What a replayed pass met, by layer: a layer that gradient checkpointing runs twice counts once."""

    agreeing: dict[int, Tensor] = field(default_factory=dict)
    """Recorded tokens whose set of experts is the one the learner would have chosen."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    """Recorded tokens."""

    def counts(self) -> tuple[int, int]:
        """(agreeing, recorded), summed over layers."""
        return int(sum(self.agreeing.values())), int(sum(self.recorded.values()))


def routers(model: PreTrainedModel) -> list[Qwen3MoeTopKRouter]:
    """The routers of a model, first layer first. Raises ValueError when it has none that replay knows."""
    found = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    if not found:
        raise ValueError(
            f"routing_replay needs a Qwen3-MoE model, and {type(model).__name__} has no such router; "
            "set routing_replay = false, or model.path to a mixture of experts such as tiny:moe"
        )
    return found


@contextmanager
def replayed_routing(model: PreTrainedModel, routing: Tensor) -> Iterator[Replay]:
    """Within, every router of `model` takes the experts in `routing` `[B, S, L, E]`, and its own where that is −1.

    The inputs must have B rows of S tokens. The backward pass belongs inside too: gradient checkpointing runs the
    layers again. Gradient: through the gates to the router.
    Raises ValueError on a shape that is not the model's.
    """
    found = routers(model)
    expected = (len(found), found[0].top_k)
    if routing.ndim != 4 or tuple(routing.shape[2:]) != expected:
        raise ValueError(f"routing of shape {tuple(routing.shape)} for a model of (layers, experts) {expected}")
    replay = Replay()
    handles = []
    for layer, router in enumerate(found):
        experts = routing[:, :, layer].reshape(-1, expected[1]).long()
        handles.append(router.register_forward_hook(partial(_take, experts=experts, layer=layer, replay=replay)))
    try:
        yield replay
    finally:
        for handle in handles:
            handle.remove()


def _take(
    router: Any,
    inputs: tuple[Tensor],
    output: tuple[Tensor, Tensor, Tensor],
    *,
    experts: Tensor,
    layer: int,
    replay: Replay,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward hook of a router: its output with the given experts in place of its own."""
    _, scores, own = output
    if len(own) != len(experts):
        raise ValueError(f"routing covers {len(experts)} tokens, the model was given {len(own)}")
    recorded = experts[:, 0] != NOT_RECORDED
    same = (own.sort(-1).values == experts.sort(-1).values).all(-1)
    replay.agreeing[layer], replay.recorded[layer] = (same & recorded).sum(), recorded.sum()
    experts = torch.where(recorded[:, None], experts, own)
    logits = F.linear(inputs[0].reshape(len(experts), -1), router.weight)
    gates = replayed_gates(logits, experts, renormalize=router.norm_topk_prob)
    return logits, gates.to(scores.dtype), experts
