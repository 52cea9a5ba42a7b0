"""Models with a few thousand parameters of every architecture the engine runs, and their Hugging Face answers."""

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "qwen3 tied, yarn": Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=_YARN),
    "qwen3, heads of 6": Qwen3Config(**_SIZES, head_dim=6),
    "llama": LlamaConfig(**_SIZES),
    "llama with biases, llama3": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_MOE),
}


def build_model(name: str = "qwen3", seed: int = 0) -> Any:
    """A transformers model with random float32 weights, biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def greedy_by_transformers(model: Any, prompt: np.ndarray, max_tokens: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None].long()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logprobs_by_transformers(model: Any, prompt: np.ndarray, response: np.ndarray, temperature: float) -> torch.Tensor:
    """`[T, V]`, at the positions that sampled the response."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None].long()
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)
