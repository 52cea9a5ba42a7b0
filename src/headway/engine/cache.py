"""Keys and values of the active requests: one row a slot, grown by doubling, never shared across versions."""

import torch
from torch import Tensor


class KVCache:
    """`keys[layer]` and `values[layer]` `[rows, kv_heads, columns, head_dim]`; rows and columns follow need."""

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
    ) -> None:
        self._heads, self._dim = num_kv_heads, head_dim
        self._max_rows, self._max_columns = max_rows, max_columns
        self.rows = self.columns = 0
        self._device, self._dtype = device, dtype
        self._starts = torch.zeros(0, dtype=torch.int64, device=device)
        self.keys = [self._zeros(0, 0) for _ in range(num_layers)]
        self.values = [self._zeros(0, 0) for _ in range(num_layers)]

    def _zeros(self, rows: int, columns: int) -> Tensor:
        # Zeros, not empty: an unwritten NaN would survive a masked softmax weight of 0.
        return torch.zeros((rows, self._heads, columns, self._dim), device=self._device, dtype=self._dtype)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; what is stored stays where it is."""
        if rows <= self.rows and columns <= self.columns:
            return
        rows_before, columns_before = self.rows, self.columns
        self.rows = _grown(rows_before, rows, self._max_rows)
        self.columns = _grown(columns_before, columns, self._max_columns)
        self._starts = torch.arange(self.rows * self._heads, device=self._device) * self.columns
        for store in (self.keys, self.values):
            for i, tensor in enumerate(store):
                store[i] = self._zeros(self.rows, self.columns)
                store[i][:rows_before, :, :columns_before] = tensor

    def flat_index(self, positions: Tensor) -> Tensor:
        """Where each head of rows 0, 1, … writes at `positions` `[n · kv_heads]`, into rows · kv_heads · columns."""
        return self._starts[: positions.shape[0]] + positions

    def append(self, layer: int, where: Tensor, k: Tensor, v: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Write one token a row at `flat_index`; returns keys and values `[n · kv_heads, longest, head_dim]`."""
        num, keys, values = where.shape[0], self.keys[layer], self.values[layer]
        keys.view(-1, self._dim).index_copy_(0, where, k)
        values.view(-1, self._dim).index_copy_(0, where, v)
        shape = (-1, self.columns, self._dim)
        return keys.view(shape)[:num, :longest], values.view(shape)[:num, :longest]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row onto another."""
        for store in (self.keys, self.values):
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Forget everything, values that are not finite included."""
        for store in (self.keys, self.values):
            for tensor in store:
                tensor.zero_()


def _grown(current: int, needed: int, limit: int) -> int:
    return current if needed <= current else min(limit, max(needed, 2 * current, 16))
