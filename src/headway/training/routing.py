"""The experts an engine recorded, checked against the model and laid out as the batch is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.errors import HeadwayError
from headway.models.routing import NOT_RECORDED, Replay, replayed_routing, routers
from headway.training.batching import Rows
from headway.types import Batch, Response


class RoutingMismatch(HeadwayError, ValueError):
    """A sample's recorded experts do not fit its tokens or the model; the message names the sample."""


class Layout(NamedTuple):
    """What a model's routing looks like.

    Example: `Layout(num_layers=4, num_chosen=2, num_experts=8)`
    """

    num_layers: int
    """Mixture-of-experts layers (L)."""
    num_chosen: int
    """Experts of one token in one layer (E)."""
    num_experts: int

    @classmethod
    def of(cls, model: Any) -> "Layout":
        """Raises ValueError when the model has no routers."""
        found = routers(model)
        return cls(len(found), found[0].top_k, found[0].num_experts)


def collate_routing(batch: Batch, layout: Layout) -> Tensor:
    """`[B, S, L, E]` int16 in the order of `batch.responses`, padded on the right to the longest with −1.

    Raises RoutingMismatch naming the first sample whose routing is absent, of another length or shape, or impossible.
    """
    members = [(group, i, response) for group in batch.groups for i, response in enumerate(group.responses)]
    width = max(len(group.prompt.token_ids) + len(response.token_ids) for group, _, response in members)
    out = np.full((len(members), width, layout.num_layers, layout.num_chosen), NOT_RECORDED, np.int16)
    for row, (group, member, response) in zip(out, members, strict=True):
        if problem := _problem(response, len(group.prompt.token_ids), layout):
            raise RoutingMismatch(f"group {group.group_id}, member {member}: {problem}")
        assert response.side.routing is not None
        row[: len(response.side.routing)] = response.side.routing
    return torch.from_numpy(out)


def _problem(response: Response, num_prompt: int, layout: Layout) -> str | None:
    routing, num_response = response.side.routing, len(response.token_ids)
    if routing is None:
        return "no routing was recorded; every engine must be asked for it (Sampling.record_routing)"
    if routing.ndim != 3 or len(routing) != num_prompt + num_response:
        return f"routing of shape {routing.shape} for {num_prompt} prompt + {num_response} response tokens"
    if routing.shape[1:] != layout[:2]:
        return f"routing of shape {routing.shape} for a model of (layers, experts per token) {tuple(layout[:2])}"
    if routing.max(initial=NOT_RECORDED) >= layout.num_experts or routing.min(initial=0) < NOT_RECORDED:
        return f"routing holds an expert outside 0 … {layout.num_experts - 1}"
    # The last token never enters the engine's model, and nothing the learner trains on comes after it.
    if (unrecorded := (routing[:-1] == NOT_RECORDED).any((1, 2))).any():
        return f"no experts recorded for token {unrecorded.argmax()} of {len(routing)}"
    ordered = np.sort(routing[:-1], -1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return "routing names an expert twice for one token"
    return None


def replaying(model: Any, rows: Rows) -> AbstractContextManager[Replay | None]:
    """Within, passes of `model` over `rows` take the recorded experts; a plain context where rows carry none."""
    if rows.routing is None:
        return nullcontext()
    return replayed_routing(model, rows.routing.to(next(model.parameters()).device))


def agreement(replays: list[Replay], add: Callable[[Tensor], Tensor] = lambda counts: counts) -> dict[str, float]:
    """`routing_agreement`: share of (token, layer) where the learner would have chosen the same experts.

    `add`: sums counts over ranks.
    """
    counts = torch.tensor([replay.counts() for replay in replays], dtype=torch.float64).reshape(-1, 2).sum(0)
    agreeing, recorded = add(counts).tolist()
    return {"routing_agreement": agreeing / recorded} if recorded else {}
