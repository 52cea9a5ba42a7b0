"""A student from a teacher: every second decoder layer of a causal LM, everything else unchanged.

    python scripts/halve_model.py SOURCE TARGET [--keep-every 2]

SOURCE is a folder or a hub id; TARGET loads with `AutoModelForCausalLM.from_pretrained`. Layers 0, 2, 4, … stay.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from headway.models.loading import load_causal_lm, load_tokenizer, save_causal_lm


def thin(source: str, target: Path, keep_every: int) -> int:
    """Write the model with layers 0, k, 2k, …; returns how many there are."""
    model = load_causal_lm(source)
    decoder: Any = model.get_decoder()
    kept = list(decoder.layers)[::keep_every]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index  # where its keys and values lie in a cache
    decoder.layers = torch.nn.ModuleList(kept)
    config = model.config
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[::keep_every]
    save_causal_lm(model, load_tokenizer(source), target)
    return len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--keep-every", type=int, default=2)
    options = parser.parse_args()
    num = thin(options.source, options.target, options.keep_every)
    print(f"{options.target}: {num} layers of {options.source}")


if __name__ == "__main__":
    main()
