"""The training side's log-probs of rows: one forward pass, as the learner takes it."""

from typing import Any

import torch
from torch import Tensor

from headway.models.policy import response_gathered_logprobs, response_logprobs
from headway.models.tiles import EAGER, Tiles
from headway.training.batching import Rows


def score_rows(
    model: Any, rows: Rows, *, temperature: float, autocast: torch.dtype, tiles: Tiles = EAGER
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) `[B, S]` on the model's device, nats, 0 where `rows.mask` is 0. Gradient: log-probs only.

    Rows with a distillation cache give the log-probs of every cached id, `[B, S, 1 + K]`, the token's own in column 0.
    """
    device = next(model.parameters()).device
    moved = rows.to(device)
    attention_mask = torch.arange(moved.input_ids.shape[1], device=device) < moved.lengths.unsqueeze(1)
    asked = (model, moved.input_ids, attention_mask, moved.mask)
    with torch.autocast(device.type, autocast, enabled=autocast != torch.float32):
        if moved.cached_ids is None:
            return response_logprobs(*asked, temperature=temperature, tiles=tiles)
        return response_gathered_logprobs(*asked, moved.cached_ids, temperature=temperature, tiles=tiles)
