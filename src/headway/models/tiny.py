"""Models small enough to learn arithmetic on a laptop while you watch, in the format of the large ones."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headway.models.loading import save_causal_lm

SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-*/=()<>?!.,:;'\n abcdefghijklmnopqrstuvwxyz"
MAX_POSITIONS = 2048

TINY_SIZES: dict[str, dict[str, Any]] = {
    "0.4m": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
    },
    "0.4m-wide": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.09,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "3m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "3m-wide": {
        "hidden_size": 384,
        "intermediate_size": 896,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "moe": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
}
"""Qwen3 shapes by their rounded number of parameters; `moe` is Qwen3-MoE with the active width of `0.4m`.

Those called wide are shallow and start with weights of unit gain: they learn from right answers, or a teacher, in half
the steps, but what they have learned they are sure of, which leaves reinforcement little to explore.
"""


def build_tiny(directory: str | Path, size: str = "0.4m", seed: int = 0) -> Path:
    """Write an untrained model and its tokenizer into `directory`; the same seed gives the same bytes.

    Raises ValueError on an unknown size.
    """
    return save_causal_lm(tiny_model(size, seed), character_tokenizer(), directory)


def tiny_model(size: str = "0.4m", seed: int = 0) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """An untrained Qwen3- or Qwen3-MoE-architecture model over `character_tokenizer`, float32, tied embeddings.

    The global random stream is left as it was. Raises ValueError on an unknown size.
    """
    if size not in TINY_SIZES:
        raise ValueError(f"no tiny model of size {size!r}: choose one of {', '.join(TINY_SIZES)}")
    pad, bos, eos = range(len(SPECIALS))
    sparse = "num_experts" in TINY_SIZES[size]
    config = (Qwen3MoeConfig if sparse else Qwen3Config)(
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        dtype="float32",
        **TINY_SIZES[size],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config) if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM(config)
    return model.float().eval()


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, nothing merged, nothing normalized: `decode(encode(s)) == s` over `CHARACTERS`.

    A character outside them becomes `?`.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    pad, bos, eos = SPECIALS
    # `?` is no special token here: decoding without special tokens must keep it.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
