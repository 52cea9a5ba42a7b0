"""Log-probs and entropy straight from hidden states and the LM head; no `[N, V]` tensor ever exists.

Logits are made in tiles (`headway.models.tiles`). Forward keeps one log-sum-exp per token; backward makes every
tile again, so the gradient is exact for any incoming gradient, at the price of one more matrix product.

N tokens, D hidden size, V vocabulary, K ids a token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.models.tiles import EAGER, Scratch, Tile, Tiles

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    tiles: Tiles = EAGER,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of one target per token, and the entropy of its whole distribution, in one pass.

    With `p = softmax((hidden @ weightᵀ + bias) / temperature)` returns `log p[n, targets[n]]` and
    `H[n] = −Σ_v p[n, v] log p[n, v]`: both `[N]`, nats, float32 (float64 for float64 inputs).

    Shapes: hidden `[N, D]`, weight `[V, D]`, targets `[N]` integers, bias `[V]`. `tiles` moves the last bits.
    Gradient: exact for the log-probs w.r.t. hidden, weight and bias; the entropy is detached. A token whose incoming
    gradient is 0 is left out of backward: it costs nothing, and a NaN in it stays there.
    Raises ValueError on a temperature ≤ 0, shapes that do not fit, or a target outside the vocabulary.
    """
    logprobs, entropy = _logprobs(hidden, weight, targets.unsqueeze(-1), temperature, tiles, bias)
    return logprobs.squeeze(-1), entropy


def gathered_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    tiles: Tiles = EAGER,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs `[N, K]` of K ids per token, and the entropy `[N]` of its whole distribution, in one pass.

    `log softmax((hidden @ weightᵀ + bias) / temperature)[n, ids[n, k]]`; ids `[N, K]` may repeat within a row.
    Everything else, gradient and errors included, as in `token_logprobs`.
    """
    return _logprobs(hidden, weight, ids, temperature, tiles, bias)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    limit: int,
    temperature: float = 1.0,
    tiles: Tiles = EAGER,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most likely of the first `limit` ids, most likely first: ids and log-probs `[N, k]`. No gradient.

    Log-probs are normalized over the whole vocabulary. Shapes as in `token_logprobs`.
    """
    _, _, lse = _forward(_Head(hidden, weight, bias, torch.zeros_like(hidden[:, :1]).long(), temperature, tiles))
    head = _Head(hidden, weight[:limit], None if bias is None else bias[:limit], hidden[:, :0], temperature, tiles)
    ids, values = hidden.new_zeros(len(hidden), k, dtype=torch.int64), lse.new_empty(len(hidden), k)
    scratch = head.scratch()
    for rows in head.rows:
        best = lse.new_full((_length(rows), 0), -torch.inf), ids[rows, :0]
        for columns in head.columns:
            tile = head.logits(rows, columns, scratch).part.topk(min(k, _length(columns)), -1)
            both = torch.cat([best[0], tile.values], 1), torch.cat([best[1], tile.indices + columns.start], 1)
            kept = both[0].topk(min(k, both[0].shape[1]), -1)
            best = kept.values, both[1].gather(1, kept.indices)
        values[rows], ids[rows] = best[0] - lse[rows, None], best[1]
    return ids, values


def _logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, tiles: Tiles, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not 0 < temperature < math.inf:
        raise ValueError(f"scoring needs a finite temperature > 0, got {temperature}: greedy (0) has no log-probs")
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or ids.ndim != 2
        or len(ids) != len(hidden)
    ):
        raise ValueError(
            f"the head takes hidden [N, D], weight [V, D] and N rows of ids, got {list(hidden.shape)}, "
            f"{list(weight.shape)} and {list(ids.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the head takes a bias of [{len(weight)}], got {list(bias.shape)}")
    if ids.dtype not in INTEGERS:
        raise ValueError(f"the head takes integer ids, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
        raise ValueError(f"ids {int(ids.min())}…{int(ids.max())} leave the vocabulary of {len(weight)} tokens")
    return _FusedHead.apply(hidden, weight, bias, ids.long(), float(temperature), tiles)  # type: ignore[return-value]


class _FusedHead(torch.autograd.Function):
    """(hidden, weight, bias, ids, temperature, tiles) → (log-probs `[N, K]`, entropy `[N]`)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        head = _Head(*inputs)
        with torch.autocast(head.hidden.device.type, enabled=False):
            logprobs, entropy, lse = _forward(head)
        ctx.save_for_backward(head.hidden, head.weight, head.bias, head.ids, lse)
        ctx.settings = head.temperature, head.tiles
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, lse = ctx.saved_tensors
        live = grads[0].ne(0).any(-1)
        head = _Head(hidden[live], weight, bias, ids[live], *ctx.settings)
        with torch.autocast(hidden.device.type, enabled=False):
            grad = grads[0][live] / head.temperature
            d_live, d_weight, d_bias = _backward(head, lse[live], grad, ctx.needs_input_grad)
        d_hidden = None
        if d_live is not None:
            d_hidden = torch.zeros_like(hidden)
            d_hidden[live] = d_live.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


@dataclass(frozen=True, slots=True)
class _Head:
    """One scoring problem, addressable by tile."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    temperature: float
    tiles: Tiles

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and sums: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def rows(self) -> Iterator[slice]:
        return _spans(len(self.hidden), self.tiles.rows)

    @property
    def columns(self) -> Iterator[slice]:
        return _spans(len(self.weight), self.tiles.columns)

    def scratch(self) -> Scratch:
        rows = self.tiles.rows if self.tiles.compiled else min(self.tiles.rows, len(self.hidden))
        return Scratch(self.hidden, rows, min(self.tiles.columns, len(self.weight)), self.dtype)

    def logits(self, rows: slice, columns: slice, scratch: Scratch) -> Tile:
        """One tile after temperature, written over whatever `scratch` held."""
        tile = scratch.tile(_length(rows), _length(columns))
        self.multiply(tile.part, self.hidden[rows], self.weight[columns].T, keep=0)
        if self.bias is not None:
            tile.part.add_(self.bias[columns])
        if self.temperature != 1:
            tile.part.div_(self.temperature)
        return tile

    def local_ids(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Ids as columns of the tile, and which of them really lie in it."""
        local = self.ids[rows] - columns.start
        inside = (local >= 0) & (local < _length(columns))
        return local.clamp_(0, _length(columns) - 1), inside

    def multiply(self, into: Tensor, a: Tensor, b: Tensor, *, keep: int = 1) -> None:
        """`into ← keep · into + a @ b`, summed in `dtype`; half-precision states keep their fast units on CUDA."""
        if self.hidden.is_cuda and self.hidden.dtype != self.dtype:
            product = torch.mm(a.to(self.hidden.dtype), b.to(self.hidden.dtype), out_dtype=self.dtype)
            into.add_(product) if keep else into.copy_(product)
        else:
            into.addmm_(a.to(self.dtype), b.to(self.dtype), beta=keep)


def _forward(head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs `[N, K]`, entropy `[N]`, log-sum-exp `[N]`."""
    logprobs = head.hidden.new_empty(head.ids.shape, dtype=head.dtype)
    entropy, lse = logprobs.new_empty(2, len(head.ids)).unbind()
    scratch = head.scratch(), head.scratch()
    for rows in head.rows:
        logprobs[rows], entropy[rows], lse[rows] = _score(head, rows, *scratch)
    return logprobs, entropy, lse


def _score(head: _Head, rows: slice, scratch: Scratch, spare: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """`_forward` for one chunk of tokens.

    Entropies of tiles join by the chain rule: H = Σ_c w_c (H_c − log w_c), w_c = exp(lse_c − lse) the mass of tile c.
    """
    picked = head.hidden.new_zeros(head.ids[rows].shape, dtype=head.dtype)
    tile_lse, tile_entropy = [], []
    for columns in head.columns:
        tile = head.logits(rows, columns, scratch)
        local, inside = head.local_ids(rows, columns)
        picked = torch.where(inside, tile.part.gather(1, local), picked)
        lse, entropy = head.tiles.summary(tile, spare.tile(*tile.part.shape))
        tile_lse.append(lse)
        tile_entropy.append(entropy)
    lses = torch.stack(tile_lse)
    lse = lses.logsumexp(0)
    log_mass = lses - lse
    entropy = (log_mass.exp() * (torch.stack(tile_entropy) - log_mass)).sum(0)
    return picked - lse.unsqueeze(-1), entropy, lse


def _backward(
    head: _Head, lse: Tensor, grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients w.r.t. hidden, weight and bias, where needed, in tiles of

    `dlogits[n, v] = Σ_k grad[n, k] (1[ids[n, k] = v] − p[n, v])`.
    """
    d_hidden = grad.new_zeros(head.hidden.shape) if needs[0] else None
    d_weight = torch.empty_like(head.weight) if needs[1] else None
    d_bias = grad.new_zeros(len(head.weight)) if head.bias is not None and needs[2] else None
    scratch = head.scratch()
    weight_scratch = Scratch(head.weight, min(head.tiles.columns, len(head.weight)), head.weight.shape[1], head.dtype)
    for columns in head.columns:
        tile_d_weight = weight_scratch.tile(*head.weight[columns].shape).part.zero_()
        for rows in head.rows:
            d_logits = _logit_gradient(head, lse, grad, rows, columns, scratch)
            if d_hidden is not None:
                head.multiply(d_hidden[rows], d_logits, head.weight[columns])
            if d_weight is not None:
                head.multiply(tile_d_weight, d_logits.T, head.hidden[rows])
            if d_bias is not None:
                d_bias[columns] += d_logits.sum(0)
        if d_weight is not None:
            d_weight[columns] = tile_d_weight
    return d_hidden, d_weight, None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype)


def _logit_gradient(head: _Head, lse: Tensor, grad: Tensor, rows: slice, columns: slice, scratch: Scratch) -> Tensor:
    tile = head.logits(rows, columns, scratch)
    d_logits = head.tiles.weigh(tile, lse[rows], -grad[rows].sum(-1))
    local, inside = head.local_ids(rows, columns)
    return d_logits.scatter_add_(1, local, grad[rows] * inside)


def _spans(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _length(span: slice) -> int:
    return span.stop - span.start
