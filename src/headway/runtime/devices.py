"""Where things are computed, and in what."""

import torch


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 on CUDA, float32 on CPU, where bfloat16 is several times slower."""
    if name == "auto":
        name = "bfloat16" if device.startswith("cuda") else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
