"""What the fused head does to one tile of logits, and how large a tile is.

Bits depend on both, so a run keeps to one choice: see `headway.runtime.head`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

COMPILE: dict[str, Any] = {"dynamic": False, "fullgraph": True, "options": {"deterministic": True}}
"""Nothing that depends on history may enter the kernels, for a resumed run must find the same bits: no shape seen
earlier as a hint, no timing, and an error where a graph would break or a limit on recompiling be met."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `rows` tokens × `columns` of the vocabulary, and whether what is done to one is compiled.

    Example: `Tiles(rows=1024, columns=2048)`, 8 MiB in float32.
    """

    rows: int = 1024
    columns: int = 2048
    """Large enough for a fast product, small enough for a tile to stay near the cache."""
    compiled: bool = False

    def summary(self, tile: "Tile", spare: "Tile") -> tuple[Tensor, Tensor]:
        """Log-sum-exp and entropy `[n]` of each row's softmax; overwrites both tiles."""
        if not self.compiled:
            return summary_in_place(tile.part, spare.part)
        lse, entropy = _compiled(summary_at_once)(tile.whole)
        return lse[: len(tile.part)], entropy[: len(tile.part)]

    def weigh(self, tile: "Tile", lse: Tensor, factor: Tensor) -> Tensor:
        """factor[n] · p[n, v] in place of the logits; lse and factor `[n]`."""
        if self.compiled:
            missing = (0, len(tile.whole) - len(tile.part))
            _compiled(weigh_in_place)(tile.whole, *(torch.nn.functional.pad(x, missing) for x in (lse, factor)))
        else:
            weigh_in_place(tile.part, lse, factor)
        return tile.part


EAGER = Tiles()

HEADS: dict[str, Tiles] = {
    "eager": EAGER,
    "compiled": Tiles(compiled=True),
    "eager_wide": Tiles(rows=4096, columns=8192),
    "compiled_wide": Tiles(rows=4096, columns=8192, compiled=True),
}
"""What `learner.head` may name: wide tiles, 128 MiB, start 16 times fewer kernels."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Memory of a tile, its rows only in part in use: compiled code sees two widths, whatever the batch."""

    whole: Tensor
    """`[rows, c]`."""
    part: Tensor
    """`[n, c]`, the first n of them."""


class Scratch:
    """Memory used again by every tile: tiles made afresh in a loop fragment the heap to many times their size."""

    def __init__(self, like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
        # Zeros, since compiled code computes on unused rows too, where garbage may be slow.
        self._rows, self._flat = rows, like.new_zeros(rows * columns, dtype=dtype)

    def tile(self, rows: int, columns: int) -> Tile:
        """For `rows` of at most the scratch's own."""
        whole = self._flat[: self._rows * columns].view(self._rows, columns)
        return Tile(whole, whole[:rows])


def summary_in_place(logits: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy H = log Σe^z − Σ e^z·z / Σe^z, z = logits − max; overwrites `logits` and `spare`."""
    peak = logits.amax(-1, keepdim=True)
    logits.sub_(peak)
    weights = torch.exp(logits, out=spare)
    total = weights.sum(-1)
    return peak.squeeze(-1) + total.log(), total.log() - weights.mul_(logits).sum(-1) / total


def summary_at_once(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`summary_in_place` without its writes, which a compiler would have to make visible."""
    peak = logits.amax(-1, keepdim=True)
    shifted = logits - peak
    weights = shifted.exp()
    total = weights.sum(-1)
    return peak.squeeze(-1) + total.log(), total.log() - (weights * shifted).sum(-1) / total


def weigh_in_place(logits: Tensor, lse: Tensor, factor: Tensor) -> None:
    """logits ← factor · exp(logits − lse)."""
    logits.sub_(lse.unsqueeze(-1)).exp_().mul_(factor.unsqueeze(-1))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, **COMPILE)
