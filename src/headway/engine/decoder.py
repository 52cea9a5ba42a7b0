"""A lean decoder over plain parameter tensors: two passes, `prefill` and `decode`, against one slot cache.

Parameters are views of whatever the caller hands in (shared memory included), but for the query and key projections,
which `bind` copies into one: at small sizes a step is as long as its list of operations. The copy also puts the two
numbers that a rotary embedding mixes side by side, in queries and keys alike, which leaves their products as they are
and makes a rotation one complex product. Activations are flat `[N, hidden]` in both passes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.engine.architecture import Architecture
from headway.engine.cache import KVCache


class Layer(NamedTuple):
    """Parameters of one layer. `*_t` are transposed, ready to be the right factor of a product."""

    input_norm: Tensor
    qk_t: Tensor
    """For each key head its query heads, then itself: `[hidden, kv_heads · (group + 1) · D]`."""
    qk_bias: Tensor | None
    v_t: Tensor
    v_bias: Tensor | None
    qk_norm: Tensor | None
    """`[group + 1, D]`: of the query heads, then of the key head they share."""
    o_t: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    mlp: "Dense | Sparse"


class Dense(NamedTuple):
    """A gated MLP."""

    gate_t: Tensor
    up_t: Tensor
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
    head_t: Tensor


Attend = Callable[[int, Tensor, Tensor], Tensor]
"""From a layer's index and what `_project` made of n tokens to what they attended to, `[n, heads · D]`."""


class Decoder:
    """Computes logits of a Llama/Qwen-style model."""

    def __init__(self, arch: Architecture, *, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.arch = arch
        self._device, self._dtype = device, dtype
        scale = arch.head_dim**-0.5
        # In the queries' weights it costs nothing, but fewer bits than float32's would round it into them.
        self._query_scale, self._scale = (scale, 1.0) if dtype == torch.float32 else (1.0, scale)
        self._group = arch.num_heads // arch.num_kv_heads
        self._turns = arch.rotations(max_length, device)
        self._columns = torch.arange(max_length, device=device)
        self._zero = torch.zeros((), device=device, dtype=dtype)
        self._minus_infinity = self._zero - torch.inf
        # A tensor: a Python number would be converted anew in every call.
        self._root_eps = {n: torch.tensor((n * arch.eps) ** 0.5) for n in (arch.hidden, arch.head_dim)}
        self._own_norm = device.type == "cpu" and dtype == torch.float32
        self._kernel = _load_kernel() if attends_by_kernel(arch, device, dtype) else None

    def make_cache(self, *, max_rows: int, max_columns: int) -> KVCache:
        """An empty cache, laid out as `decode` reads it."""
        return KVCache(
            num_layers=self.arch.num_layers,
            num_kv_heads=self.arch.num_kv_heads,
            head_dim=self.arch.head_dim,
            max_rows=max_rows,
            max_columns=max_columns,
            device=self._device,
            dtype=self._dtype,
            columns_innermost=self._kernel is not None,
        )

    def bind(self, tensors: Mapping[str, Tensor]) -> Parameters:
        """Arrange checked tensors for the two passes: views where device and dtype already fit."""
        own = {name: t.detach().to(self._device, self._dtype) for name, t in tensors.items()}
        embedding = own["model.embed_tokens.weight"]
        return Parameters(
            embedding=embedding,
            layers=tuple(self._bind_layer(own, i) for i in range(self.arch.num_layers)),
            norm=self._norm_weight(own["model.norm.weight"]),
            head_t=(embedding if self.arch.tied else own["lm_head.weight"]).t(),
        )

    def _bind_layer(self, own: Mapping[str, Tensor], index: int) -> Layer:
        at, attn = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        biases = [own[name] for x in "qkv" if (name := f"{attn}{x}_proj.bias") in own]
        weights = [own[f"{attn}{x}_proj.weight"] for x in "qkv"]
        norms = [self._norm_weight(self._paired(own[name])) for x in "qk" if (name := f"{attn}{x}_norm.weight") in own]
        # The queries carry attention's scale; a norm after the projection would take it out again.
        for scaled in (norms,) if norms else (weights, biases):
            scaled[:1] = [queries * self._query_scale for queries in scaled[:1]]
        return Layer(
            input_norm=self._norm_weight(own[f"{at}input_layernorm.weight"]),
            qk_t=self._by_key_head(*weights[:2]).t(),
            qk_bias=self._by_key_head(*biases[:2]) if biases else None,
            v_t=weights[2].t(),
            v_bias=biases[2] if biases else None,
            qk_norm=torch.stack([norms[0]] * self._group + [norms[1]]) if len(norms) == 2 else None,
            o_t=own[f"{attn}o_proj.weight"].t(),
            o_bias=own.get(f"{attn}o_proj.bias"),
            mlp_norm=self._norm_weight(own[f"{at}post_attention_layernorm.weight"]),
            mlp=_bind_mlp(own, f"{at}mlp.", self.arch.is_sparse(index)),
        )

    def _by_key_head(self, q: Tensor, k: Tensor) -> Tensor:
        """Rows of the query and key projections, regrouped by key head."""
        regrouped = (self._paired(part).reshape(self.arch.num_kv_heads, -1, *part.shape[1:]) for part in (q, k))
        return torch.cat(list(regrouped), 1).flatten(0, 1)

    def _paired(self, rows: Tensor) -> Tensor:
        """Rows i and i + D/2 of every head side by side: what a rotation mixes."""
        halves = rows.view(-1, 2, self.arch.head_dim // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

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
        turns = self._turns_at(self._columns[:length].repeat(num))
        hidden = F.embedding(ids.reshape(-1), params.embedding)
        for i, layer in enumerate(params.layers):
            qk, v = self._project(layer, hidden, turns)
            parts = (qk[:, :-1], qk[:, -1], v)
            q, k, v = (t.reshape(num, length, -1, self.arch.head_dim).transpose(1, 2) for t in parts)
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
        way = self._padded if self._kernel is None else self._each_its_length
        attend = way(cache, positions, longest)
        turns = self._turns_at(positions)
        hidden = F.embedding(ids, params.embedding)
        for i, layer in enumerate(params.layers):
            qk, v = self._project(layer, hidden, turns)
            self._finish_layer(layer, hidden, attend(i, qk, v), routes)
        hidden = self._norm(hidden, params.norm)
        return torch.mm(hidden, params.head_t)

    def _each_its_length(self, cache: KVCache, positions: Tensor, longest: int) -> Attend:
        """Each row as long as it is, in the kernel, which checks no bounds."""
        num, kv, dim = positions.shape[0], self.arch.num_kv_heads, self.arch.head_dim
        assert self._kernel is not None and num <= cache.rows and longest <= cache.columns
        kernel, layers, at = self._kernel, cache.arrays, positions.numpy()
        out = torch.empty(num, kv * self._group * dim, dtype=self._dtype)
        by_head = out.view(num, kv, self._group, dim).numpy()

        def attend_layer(index: int, qk: Tensor, v: Tensor) -> Tensor:
            kernel(qk.view(num, kv, -1, dim).numpy(), v.view(num, kv, dim).numpy(), at, *layers[index], by_head)
            return out

        return attend_layer

    def _padded(self, cache: KVCache, positions: Tensor, longest: int) -> Attend:
        """All rows as long as the longest, in products of the library."""
        num, kv = positions.shape[0], self.arch.num_kv_heads
        per_kv_head = positions[:, None].expand(num, kv).reshape(-1)
        where = cache.flat_index(per_kv_head)
        hidden_columns = self._columns[:longest] > per_kv_head[:, None, None]
        bias = torch.where(hidden_columns, self._minus_infinity, self._zero)
        new, cached = cache.tokens(), cache.rows_up_to(num * kv, longest)

        def attend_layer(index: int, qk: Tensor, v: Tensor) -> Tensor:
            new[index][0].index_copy_(0, where, qk[:, -1])
            new[index][1].index_copy_(0, where, v)
            return self._padded_attention(qk[:, :-1], *cached[index], bias).view(num, -1)

        return attend_layer

    def _padded_attention(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
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
        if not self._own_norm:
            return F.rms_norm(x, x.shape[-1:], eps=self.arch.eps) * weight
        # Half the time of torch's unfused CPU kernel: √(mean(x²) + eps) = hypot(‖x‖, √(n·eps)) / √n, √n in the weight.
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * weight).div_(torch.hypot(size, self._root_eps[x.shape[-1]]))

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight * weight.shape[-1] ** 0.5 if self._own_norm else weight

    def _project(self, layer: Layer, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and the key they share `[N·kv_heads, group + 1, D]`, and values `[N·kv_heads, D]`."""
        x = self._norm(hidden, layer.input_norm)
        qk = _product(x, layer.qk_t, layer.qk_bias).view(-1, self._group + 1, self.arch.head_dim)
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        qk = (qk.float().view(torch.complex64) * turns).view(torch.float32).to(x.dtype)
        return qk, _product(x, layer.v_t, layer.v_bias).view(-1, self.arch.head_dim)

    def _turns_at(self, positions: Tensor) -> Tensor:
        """Rotations of the query heads and the key head of tokens at `positions` `[N]`: `[N·kv, group + 1, D/2]`."""
        num_rows = self.arch.num_kv_heads * (self._group + 1)
        index = positions[:, None].expand(-1, num_rows).reshape(-1)
        return self._turns.index_select(0, index).view(-1, self._group + 1, self.arch.head_dim // 2)

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
        inner = F.silu(_product(x, mlp.gate_t, mlp.gate_bias), inplace=True)
        hidden.addmm_(inner.mul_(_product(x, mlp.up_t, mlp.up_bias)), mlp.down_t)
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


def attends_by_kernel(arch: Architecture, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `decode` attends in the compiled kernel, which has one thread, and not in padded products."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return is_one_thread and dtype == torch.float32 and arch.head_dim % 4 == 0


def _load_kernel() -> Any:
    from headway.engine.kernels import attend  # a compiler comes with it, which no other device needs

    return attend


def _product(x: Tensor, weight_t: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight_t) if bias is None else torch.addmm(bias, x, weight_t)


def _bind_mlp(own: Mapping[str, Tensor], at: str, sparse: bool) -> Dense | Sparse:
    if sparse:
        return Sparse(own[f"{at}gate.weight"], own[f"{at}experts.gate_up_proj"], own[f"{at}experts.down_proj"])
    names: dict[str, Any] = {x: own.get(f"{at}{x}_proj.bias") for x in ("gate", "up", "down")}
    return Dense(
        gate_t=own[f"{at}gate_proj.weight"].t(),
        up_t=own[f"{at}up_proj.weight"].t(),
        down_t=own[f"{at}down_proj.weight"].t(),
        gate_bias=names["gate"],
        up_bias=names["up"],
        down_bias=names["down"],
    )
