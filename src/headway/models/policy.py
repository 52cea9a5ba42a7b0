"""What a policy says of given tokens: one pass through the backbone, the head only where it is asked."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.models.head import gathered_logprobs, token_logprobs
from headway.models.tiles import EAGER, Tiles

LOGIT_CHANGES: dict[str, Any] = {
    "final_logit_softcapping": None,
    "logits_scaling": 1,
    "logit_scale": 1,
}
"""Settings of models that alter logits after the head, and the value that leaves them alone."""


def response_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    predict_mask: Tensor,
    *,
    temperature: float = 1.0,
    tiles: Tiles = EAGER,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of tokens already written: entry t is `log π(token_t | tokens_<t)`.

    Shapes: all `[B, S]`, padded on the right; returns (logprobs, entropy) `[B, S]`, nats, 0 where `predict_mask` is
    False. Gradient: exact for the log-probs, none for the entropy.
    Raises ValueError when a first token is asked for (nothing precedes it), or as `token_logprobs` does.
    """
    hidden = predicting_states(model, input_ids, attention_mask, predict_mask)
    weight, bias = head_weights(model)
    asked = (hidden, weight, input_ids[predict_mask])
    logprobs, entropy = token_logprobs(*asked, temperature=temperature, tiles=tiles, bias=bias)
    blank = logprobs.new_zeros(input_ids.shape)
    return blank.masked_scatter(predict_mask, logprobs), blank.masked_scatter(predict_mask, entropy)


def response_gathered_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    predict_mask: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    tiles: Tiles = EAGER,
) -> tuple[Tensor, Tensor]:
    """Log-probs `[B, S, K]` of K ids at every predicted position, `log π(ids[b, t, k] | tokens_<t)`, and entropies.

    ids `[B, S, K]`; the rest, gradient included, as in `response_logprobs`.
    """
    hidden = predicting_states(model, input_ids, attention_mask, predict_mask)
    weight, bias = head_weights(model)
    asked = (hidden, weight, ids[predict_mask])
    logprobs, entropy = gathered_logprobs(*asked, temperature=temperature, tiles=tiles, bias=bias)
    spread = logprobs.new_zeros(ids.shape).masked_scatter(predict_mask.unsqueeze(-1), logprobs)
    return spread, entropy.new_zeros(predict_mask.shape).masked_scatter(predict_mask, entropy)


def predicting_states(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, predict_mask: Tensor
) -> Tensor:
    """`[N, D]`: for each asked token, row by row, the last hidden state of the position before it."""
    if predict_mask[:, 0].any():
        raise ValueError("predict_mask asks for the first token of a sequence, which nothing precedes")
    backbone = model.get_decoder()
    states = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return states[:, :-1][predict_mask[:, 1:]]


def head_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight `[V, D]` and bias of the LM head. Raises ValueError when the model alters logits after its head."""
    for name, neutral in LOGIT_CHANGES.items():
        if (value := getattr(model.config, name, neutral)) != neutral:
            raise ValueError(f"{name} = {value} changes logits after the head, which log-prob scoring does not do")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear LM head to score tokens with")
    return head.weight, head.bias
