"""Weights rounded as a quantized engine would hold them: a forced, repeatable train–inference discrepancy."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from torch import bfloat16 as bfloat16_dtype

Rounding = Literal["none", "bfloat16", "int8"]


def round_weights(tensors: Mapping[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    """The parameters after one trip through another number format, in their own dtype; "none" copies nothing.

    `bfloat16`: every tensor, round to nearest even. `int8`: matrices only, symmetric, one scale a row:
    scale = max|w| / 127, w ← scale · round(w / scale); vectors (norms, biases) stay, as quantized engines leave them.
    """
    match rounding:
        case "none":
            return dict(tensors)
        case "bfloat16":
            return {name: t.to(bfloat16_dtype).to(t.dtype) for name, t in tensors.items()}
        case "int8":
            return {name: _int8(t) if t.ndim >= 2 else t for name, t in tensors.items()}


def _int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-1, keepdim=True) / 127
    steps = (weight / scale.clamp(min=1e-30)).round()
    return steps * scale
