"""Where things are computed, and in what."""

import torch


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def device_problem(name: str) -> str | None:
    """Why a model cannot compute on the device of that name on this machine; None when it can."""
    if name in ("auto", "cpu"):
        return None
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        return 'it is none of "auto", "cpu", "cuda" and "cuda:N"'
    num_here = torch.cuda.device_count()
    if int(number or 0) >= num_here:
        return f"this machine has {num_here} CUDA device(s), counted from 0"
    return None


def pick_dtype(name: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 on CUDA, float32 on CPU, where bfloat16 is several times slower."""
    if name == "auto":
        name = "bfloat16" if device.startswith("cuda") else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
