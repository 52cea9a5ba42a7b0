"""The training side's log-probs of rows: one forward pass, as the learner takes it."""

from typing import Any

import torch
from torch import Tensor

from headway.models.policy import response_logprobs
from headway.training.batching import Rows


def score_rows(model: Any, rows: Rows, *, temperature: float, autocast: torch.dtype) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) `[B, S]` on the model's device, nats, 0 where `rows.mask` is 0. Gradient: log-probs only."""
    device = next(model.parameters()).device
    moved = rows.to(device)
    attention_mask = torch.arange(moved.input_ids.shape[1], device=device) < moved.lengths.unsqueeze(1)
    with torch.autocast(device.type, autocast, enabled=autocast != torch.float32):
        return response_logprobs(model, moved.input_ids, attention_mask, moved.mask, temperature=temperature)
