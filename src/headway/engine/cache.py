"""Keys and values of the active requests: one row a slot, grown by doubling, never shared across versions."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class KVCache:
    """Keys and values `[layers, rows, kv_heads, columns, head_dim]`; rows and columns follow need.

    With `columns_innermost`, on CPU, entry d of a key head is contiguous over the columns, for a kernel that reads
    `arrays`; without, keys lie like values, for products that read `tokens` and `rows_up_to`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        max_columns: int,
        device: torch.device,
        dtype: torch.dtype,
        columns_innermost: bool = False,
    ) -> None:
        self._columns_innermost = columns_innermost
        self._layers, self._heads, self._dim = num_layers, num_kv_heads, head_dim
        self._max_rows, self._max_columns = max_rows, max_columns
        self.rows = self.columns = 0
        self._device, self._dtype = device, dtype
        self._starts = torch.zeros(0, dtype=torch.int64, device=device)
        self._allocate()

    def _allocate(self) -> None:
        # Zeros, not empty: an unwritten NaN would survive a masked softmax weight of 0.
        shape = (self._layers, self.rows, self._heads, self.columns, self._dim)
        keys, self.values = (torch.zeros(shape, device=self._device, dtype=self._dtype) for _ in range(2))
        self.arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
        """With `columns_innermost`, on CPU: each layer's keys `[rows, kv_heads, head_dim, columns]`, and its values."""
        if self._columns_innermost:
            keys = keys.view(*shape[:3], self._dim, self.columns)
            self.arrays = [(k.numpy(), v.numpy()) for k, v in zip(keys, self.values, strict=True)]
        self.keys = keys.mT if self._columns_innermost else keys

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; what is stored stays where it is."""
        if rows <= self.rows and columns <= self.columns:
            return
        before, rows_before, columns_before = (self.keys, self.values), self.rows, self.columns
        self.rows = _grown(rows_before, rows, self._max_rows)
        self.columns = _grown(columns_before, columns, self._max_columns)
        self._starts = torch.arange(self.rows * self._heads, device=self._device) * self.columns
        self._allocate()
        for store, old in zip((self.keys, self.values), before, strict=True):
            store[:, :rows_before, :, :columns_before] = old

    def flat_index(self, positions: Tensor) -> Tensor:
        """Where each head of rows 0, 1, … writes at `positions` `[n · kv_heads]`, into rows · kv_heads · columns."""
        return self._starts[: positions.shape[0]] + positions

    def tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer to write at `flat_index`: `[rows · kv_heads · columns, head_dim]`."""
        return self._by_layer(lambda store: store.view(self._layers, -1, self._dim))

    def rows_up_to(self, num: int, longest: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer to attend to: `[num = n · kv_heads, longest, head_dim]`."""
        shape = (self._layers, -1, self.columns, self._dim)
        return self._by_layer(lambda store: store.view(shape)[:, :num, :longest])

    def _by_layer(self, view: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(view(self.keys).unbind(), view(self.values).unbind(), strict=True))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row onto another."""
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]

    def clear(self) -> None:
        """Forget everything, values that are not finite included."""
        self.keys.zero_()
        self.values.zero_()


def _grown(current: int, needed: int, limit: int) -> int:
    return current if needed <= current else min(limit, max(needed, 2 * current, 16))
