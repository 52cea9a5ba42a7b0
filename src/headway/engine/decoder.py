"""A lean decoder over plain parameter tensors: two passes, `prefill` and `decode`, against one slot cache.

Parameters are views of whatever the caller hands in (shared memory included); nothing is fused or copied, so a new
version of the weights costs one `bind`. Activations are flat `[N, hidden]` in both passes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.engine.architecture import Architecture
from headway.engine.cache import KVCache


class Layer(NamedTuple):
    """Parameters of one layer. `*_t` are transposed views, ready for `addmm_` into the residual stream."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_t: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    mlp: "Dense | Sparse"


class Dense(NamedTuple):
    """A gated MLP."""

    gate: Tensor
    up: Tensor
    down_t: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


class Sparse(NamedTuple):
    """A mixture of gated MLPs."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


class Parameters(NamedTuple):
    """One version of the weights."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


class Decoder:
    """Computes logits of a Llama/Qwen-style model."""

    def __init__(self, arch: Architecture, *, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.arch = arch
        self._device, self._dtype = device, dtype
        self._scale = arch.head_dim**-0.5
        self._group = arch.num_heads // arch.num_kv_heads
        self._cos, self._sin = arch.rope_tables(max_length, device, dtype)
        self._columns = torch.arange(max_length, device=device)
        self._zero = torch.zeros((), device=device, dtype=dtype)
        self._minus_infinity = self._zero - torch.inf
        # As tensors: a Python number would be converted anew in every call.
        self._root_eps = torch.tensor(arch.eps**0.5)
        self._scales = {n: torch.tensor(n**-0.5) for n in (arch.hidden, arch.head_dim)}

    def bind(self, tensors: Mapping[str, Tensor]) -> Parameters:
        """Arrange checked tensors for the two passes: views where device and dtype already fit."""
        own = {name: t.detach().to(self._device, self._dtype) for name, t in tensors.items()}
        embedding = own["model.embed_tokens.weight"]
        return Parameters(
            embedding=embedding,
            layers=tuple(self._bind_layer(own, i) for i in range(self.arch.num_layers)),
            norm=own["model.norm.weight"],
            head=embedding if self.arch.tied else own["lm_head.weight"],
        )

    def _bind_layer(self, own: Mapping[str, Tensor], index: int) -> Layer:
        at, attn = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        return Layer(
            input_norm=own[f"{at}input_layernorm.weight"],
            q=own[f"{attn}q_proj.weight"],
            k=own[f"{attn}k_proj.weight"],
            v=own[f"{attn}v_proj.weight"],
            q_bias=own.get(f"{attn}q_proj.bias"),
            k_bias=own.get(f"{attn}k_proj.bias"),
            v_bias=own.get(f"{attn}v_proj.bias"),
            q_norm=own.get(f"{attn}q_norm.weight"),
            k_norm=own.get(f"{attn}k_norm.weight"),
            o_t=own[f"{attn}o_proj.weight"].t(),
            o_bias=own.get(f"{attn}o_proj.bias"),
            mlp_norm=own[f"{at}post_attention_layernorm.weight"],
            mlp=_bind_mlp(own, f"{at}mlp.", self.arch.is_sparse(index)),
        )

    def prefill(
        self,
        params: Parameters,
        cache: KVCache,
        ids: Tensor,
        rows: Tensor,
        source: Tensor,
        routes: list[Tensor] | None = None,
    ) -> None:
        """Fill the cache with keys and values of `ids` `[U, S]`, right-padded: row `rows[j]` gets `ids[source[j]]`.

        What padding writes lies beyond a row's length, is never attended to, and is overwritten as the row grows.
        `routes`, if given, receives the experts chosen in each mixture-of-experts layer, `[U · S, E]`.
        """
        num, length = ids.shape
        cos, sin = self._rotations(self._columns[:length].repeat(num))
        hidden = F.embedding(ids.reshape(-1), params.embedding)
        for i, layer in enumerate(params.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            q, k, v = (t.view(num, length, -1, self.arch.head_dim).transpose(1, 2) for t in (q, k, v))
            cache.keys[i][rows, :, :length] = k[source]
            cache.values[i][rows, :, :length] = v[source]
            if i + 1 == self.arch.num_layers and routes is None:
                return  # nothing reads the last layer's output: the pending token makes the logits
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._group > 1)
            self._finish_layer(layer, hidden, out.transpose(1, 2).reshape(num * length, -1), routes)

    def decode(
        self,
        params: Parameters,
        cache: KVCache,
        ids: Tensor,
        positions: Tensor,
        longest: int,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits `[n, V]` after each row's pending token `ids` `[n]`, which sits at `positions` `[n]` < `longest`.

        `routes`, if given, receives the experts chosen in each mixture-of-experts layer, `[n, E]`.
        """
        num, kv = ids.shape[0], self.arch.num_kv_heads
        cos, sin = self._rotations(positions)
        per_kv_head = positions[:, None].expand(num, kv).reshape(-1)
        where = cache.flat_index(per_kv_head)
        hidden_columns = self._columns[:longest] > per_kv_head[:, None, None]
        bias = torch.where(hidden_columns, self._minus_infinity, self._zero)
        hidden = F.embedding(ids, params.embedding)
        for i, layer in enumerate(params.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            keys, values = cache.append(i, where, k, v, longest)
            q = q.view(-1, self._group, self.arch.head_dim)
            self._finish_layer(layer, hidden, self._attend(q, keys, values, bias).view(num, -1), routes)
        hidden = self._norm(hidden, params.norm)
        return F.linear(hidden, params.head)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """`[n·kv, group, D]`: query heads that share keys are rows of one product, so keys are never repeated."""
        if q.is_cuda:
            return F.scaled_dot_product_attention(
                q[None],
                keys[None],
                values[None],
                attn_mask=bias[None].expand(1, -1, self._group, -1),
                scale=self._scale,
            )
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weight / √(mean(x²) + eps) over the last dimension."""
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.arch.eps)
        # Half the time of torch's unfused CPU kernel: √(mean(x²) + eps) = hypot(‖x‖ / √n, √eps).
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(self._scales[x.shape[-1]])
        return (x * weight).div_(torch.hypot(size, self._root_eps))

    def _project(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[N·heads, D]` and keys `[N·kv_heads, D]`, and values `[N, kv_heads·D]`."""
        x = self._norm(hidden, layer.input_norm)
        q = F.linear(x, layer.q, layer.q_bias).view(-1, self.arch.head_dim)
        k = F.linear(x, layer.k, layer.k_bias).view(-1, self.arch.head_dim)
        v = F.linear(x, layer.v, layer.v_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        both = torch.cat((q, k))
        both = torch.addcmul(both * cos, both.roll(self.arch.head_dim // 2, -1), sin)
        return both[: q.shape[0]], both[q.shape[0] :], v

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for all query heads of tokens at `positions` `[N]`, then all key heads: `[N·(heads + kv), D]`."""
        num, arch = positions.shape[0], self.arch
        rows = [positions[:, None].expand(num, n).reshape(-1) for n in (arch.num_heads, arch.num_kv_heads)]
        index = torch.cat(rows)
        return self._cos[index], self._sin[index]

    def _finish_layer(self, layer: Layer, hidden: Tensor, attended: Tensor, routes: list[Tensor] | None) -> None:
        """Add the attention output and the MLP to the residual stream, in place."""
        hidden.addmm_(attended, layer.o_t)
        if layer.o_bias is not None:
            hidden.add_(layer.o_bias)
        x = self._norm(hidden, layer.mlp_norm)
        mlp = layer.mlp
        if isinstance(mlp, Sparse):
            hidden.add_(self._mix_experts(mlp, x, routes))
            return
        inner = F.silu(F.linear(x, mlp.gate, mlp.gate_bias), inplace=True)
        hidden.addmm_(inner.mul_(F.linear(x, mlp.up, mlp.up_bias)), mlp.down_t)
        if mlp.down_bias is not None:
            hidden.add_(mlp.down_bias)

    def _mix_experts(self, mlp: Sparse, x: Tensor, routes: list[Tensor] | None) -> Tensor:
        probs = torch.softmax(F.linear(x, mlp.router), -1, dtype=torch.float32)
        weights, chosen = probs.topk(self.arch.num_experts_per_token, -1)
        if routes is not None:
            routes.append(chosen)
        if self.arch.normalize_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(x[token], mlp.gate_up[expert]).chunk(2, -1)
            partial = F.linear(F.silu(gate) * up, mlp.down[expert])
            out.index_add_(0, token, partial * weights[token, choice, None])
        return out


def _bind_mlp(own: Mapping[str, Tensor], at: str, sparse: bool) -> Dense | Sparse:
    if sparse:
        return Sparse(own[f"{at}gate.weight"], own[f"{at}experts.gate_up_proj"], own[f"{at}experts.down_proj"])
    names: dict[str, Any] = {x: own.get(f"{at}{x}_proj.bias") for x in ("gate", "up", "down")}
    return Dense(
        gate=own[f"{at}gate_proj.weight"],
        up=own[f"{at}up_proj.weight"],
        down_t=own[f"{at}down_proj.weight"].t(),
        gate_bias=names["gate"],
        up_bias=names["up"],
        down_bias=names["down"],
    )
