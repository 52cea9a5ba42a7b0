"""Which models the built-in engine runs, and the names and shapes of their parameters.

Everything is read from a transformers configuration; what the decoder cannot compute exactly is refused by name.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway.protocols import WeightsRefused

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


class Architecture:
    """The sizes of a decoder-only transformer, read from its configuration.

    Raises ValueError naming the feature when the configuration asks for something the decoder does not compute.
    """

    def __init__(self, config: Any) -> None:
        _refuse_unsupported(config)
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.hidden: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden // self.num_heads
        self.eps: float = config.rms_norm_eps
        self.tied: bool = bool(config.tie_word_embeddings)
        self.num_experts_per_token: int = getattr(config, "num_experts_per_tok", 0) or 0
        self.normalize_experts: bool = bool(getattr(config, "norm_topk_prob", False))
        self.num_experts: int = getattr(config, "num_experts", 0) or 0
        self.num_sparse_layers: int = sum(self.is_sparse(layer) for layer in range(self.num_layers))

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        c = self.config
        if c.model_type != "qwen3_moe" or layer in (c.mlp_only_layers or ()):
            return False
        return c.num_experts > 0 and (layer + 1) % c.decoder_sparse_step == 0

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by its Hugging Face name; `lm_head.weight` only when it is not the embedding."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        for i in range(self.num_layers):
            layer = self._attention_shapes() | self._mlp_shapes(i)
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        kind, h, d = self.config.model_type, self.hidden, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
        }
        if kind.startswith("qwen3"):
            shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        bias = getattr(self.config, "attention_bias", False)
        if kind == "qwen2" or bias:
            shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if kind != "qwen2" and bias:
            shapes["self_attn.o_proj.bias"] = (h,)
        return shapes

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        c, h = self.config, self.hidden
        if self.is_sparse(layer):
            num, inner = c.num_experts, c.moe_intermediate_size
            return {
                "mlp.gate.weight": (num, h),
                "mlp.experts.gate_up_proj": (num, 2 * inner, h),
                "mlp.experts.down_proj": (num, h, inner),
            }
        inner = c.intermediate_size
        sizes = {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}
        shapes: dict[str, tuple[int, ...]] = {f"mlp.{x}_proj.weight": size for x, size in sizes.items()}
        if getattr(c, "mlp_bias", False):
            shapes |= {f"mlp.{x}_proj.bias": size[:1] for x, size in sizes.items()}
        return shapes

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsRefused naming the first tensor that is missing, unexpected, misshapen or not finite."""
        shapes = self.parameter_shapes()
        optional = {"lm_head.weight"} if self.tied else set()
        if missing := sorted(shapes.keys() - tensors.keys()):
            raise WeightsRefused(f"weights refused: {len(missing)} tensors are missing, first {missing[0]!r}")
        if extra := sorted(tensors.keys() - shapes.keys() - optional):
            raise WeightsRefused(f"weights refused: {len(extra)} unknown tensors, first {extra[0]!r}")
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape:
                found = tuple(tensors[name].shape)
                raise WeightsRefused(f"weights refused: {name!r} has shape {found}, expected {shape}")
            if not _is_finite(tensors[name]):
                raise WeightsRefused(f"weights refused: {name!r} holds values that are not finite")

    def rotations(self, length: int, device: torch.device) -> Tensor:
        """The rotary embedding as complex factors `[length, head_dim / 2]`: scale · exp(i · position · frequency)."""
        parameters = self.config.rope_parameters
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            frequencies, scale = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, torch.device("cpu"))
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
        return torch.complex(angles.cos() * scale, angles.sin() * scale).to(device)


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    if kind not in SUPPORTED:
        raise ValueError(f"model type {kind!r} is not supported by the torch engine; it runs {', '.join(SUPPORTED)}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported by the torch engine; it runs silu")
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides or (kind == "qwen3_moe" and getattr(config, "sliding_window", None) is not None):
        raise ValueError("sliding-window attention is not supported by the torch engine; set use_sliding_window=false")
    rope = config.rope_parameters
    if rope["rope_type"] not in SUPPORTED_ROPE:
        raise ValueError(
            f"rope type {rope['rope_type']!r} is not supported by the torch engine; it runs {', '.join(SUPPORTED_ROPE)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported by the torch engine; it rotates whole heads")


def _is_finite(tensor: Tensor) -> bool:
    # One reading pass: any NaN or infinity makes the sum non-finite. A sum may also overflow by itself,
    # so only then look at the elements.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
