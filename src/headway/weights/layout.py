"""Where each tensor lies in a safetensors file, and reading one that can be trusted.

    8 bytes: length of the header │ header: JSON, padded with blanks │ the tensors' bytes, end to end

The header's `__metadata__` says which version the file holds and whether it is `complete`, so that a half-written
file is known as such; the checksum over all bytes says the rest. Any safetensors reader opens these files.
"""

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from headway.protocols import WeightsRefused
from headway.types import WeightRef

State = Literal["writing", "complete"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_LENGTH = struct.Struct("<Q")
_MAX_VERSION = 10**18
_MAX_LENGTH, _MAX_AXES = 1 << 48, 8
"""Of an axis, and axes of a tensor: more is damage."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place. Example: `Slot(dtype=torch.float32, shape=(2, 3), start=128, end=152)`"""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all tensors; the same for every version of a model."""

    slots: dict[str, Slot]
    header_size: int
    """Bytes before the first tensor."""
    size: int
    """Bytes of the whole file."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Raises ValueError for a dtype that safetensors does not know."""
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPE_NAMES:
                raise ValueError(f"weight {name!r} has dtype {tensor.dtype}; allowed: {', '.join(_DTYPES)}")
        # Widest elements first keeps every tensor aligned to its element.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        offset, relative = 0, {}
        for name in names:
            tensor = tensors[name]
            relative[name] = Slot(tensor.dtype, tuple(tensor.shape), offset, offset + tensor.nbytes)
            offset += tensor.nbytes
        longest = len(_header_json(relative, 0, _MAX_VERSION, "complete"))
        header_size = _LENGTH.size + math.ceil(longest / 8) * 8
        slots = {
            name: Slot(s.dtype, s.shape, header_size + s.start, header_size + s.end) for name, s in relative.items()
        }
        return cls(slots, header_size, header_size + offset)

    def header(self, version: int, state: State) -> bytes:
        """The file's first `header_size` bytes."""
        length = self.header_size - _LENGTH.size
        return _LENGTH.pack(length) + _header_json(self.slots, self.header_size, version, state).ljust(length)

    def difference(self, other: "Layout") -> str | None:
        """The first tensor that lies differently in `other`, in words."""
        for name in sorted({*self.slots, *other.slots}):
            here, there = self.slots.get(name), other.slots.get(name)
            if here is None or there is None:
                return f"{name!r} is {'missing' if there is None else 'new'}"
            if (here.dtype, here.shape) != (there.dtype, there.shape):
                return f"{name!r} was {here.dtype} {list(here.shape)}, now {there.dtype} {list(there.shape)}"
        return None


def served(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter as engines compute with it: floating-point ones rounded to `dtype`, if one is given."""
    return tensor.detach().to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _header_json(slots: Mapping[str, Slot], base: int, version: int, state: State) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version), "state": state}}
    for name, slot in slots.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.start - base, slot.end - base],
        }
    return json.dumps(entries, separators=(",", ":")).encode()


def read_weights(ref: WeightRef) -> dict[str, Tensor]:
    """The tensors of a published version, as views of its file: copy what you keep, and write to none of them.

    The views are valid while the channel holds the version, that is until the next-but-one publish begins.
    Raises WeightsRefused, naming the file and what differs, unless the file is there, is whole, holds
    `ref.version`, and has `ref.checksum`.
    """
    buffer = _map(ref)
    try:
        slots = verified_slots(ref, buffer)
    except WeightsRefused:
        release_mappings()
        raise
    return {name: _view(buffer, slot) for name, slot in slots.items()}


def verified_slots(ref: WeightRef, buffer: mmap.mmap | memoryview) -> dict[str, Slot]:
    """Where the tensors lie in a version's bytes. Raises WeightsRefused unless these are whole and what `ref` says."""
    slots = _parse(ref, buffer)
    found = xxhash.xxh3_64_hexdigest(buffer)
    if found != ref.checksum:
        raise refused(ref, f"its checksum is {found}, not {ref.checksum}")
    return slots


def release_mappings() -> None:
    """Let go of the files that `read_weights` keeps mapped in this process."""
    _mapping.cache_clear()


def _map(ref: WeightRef) -> mmap.mmap:
    try:
        found = os.stat(ref.path)
        if not stat.S_ISREG(found.st_mode) or found.st_size < _LENGTH.size:
            raise refused(ref, f"it is no weights file ({found.st_size} bytes)")
        return _mapping(ref.path, found.st_ino, found.st_size)
    except OSError as error:
        raise refused(ref, f"it cannot be read: {error.strerror}") from error


# Faulting in the pages of a fresh mapping takes as long as copying them: keep the two that a channel writes in turn.
@lru_cache(maxsize=2)
def _mapping(path: str, inode: int, size: int) -> mmap.mmap:
    # A private mapping: torch wants writable memory, and what is written to it must not reach the file.
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def _parse(ref: WeightRef, buffer: mmap.mmap | memoryview) -> dict[str, Slot]:
    (length,) = _LENGTH.unpack(buffer[: _LENGTH.size])
    base = _LENGTH.size + length
    if base > len(buffer):
        raise refused(ref, f"it is cut short: {len(buffer)} bytes, less than its header of {base}")
    try:
        entries = json.loads(bytes(buffer[_LENGTH.size : base]))
        metadata = entries.pop("__metadata__")
        version, state = metadata["version"], metadata["state"]
        slots = {name: _slot(entry, base) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refused(ref, f"its header is damaged ({error!r})") from error
    size = max((slot.end for slot in slots.values()), default=base)
    if len(buffer) != size:
        raise refused(ref, f"it is cut short or overlong: {len(buffer)} bytes instead of {size}")
    if state != "complete":
        raise refused(ref, f"it is half-written (state {state!r})")
    if version != str(ref.version):
        raise refused(ref, f"it holds version {version}")
    return slots


def _slot(entry: Mapping[str, Any], base: int) -> Slot:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not all(isinstance(n, int) and 0 <= n < _MAX_LENGTH for n in (*shape, start, end)) or len(shape) > _MAX_AXES:
        raise ValueError(f"shape {shape} or place {start}:{end} makes no sense")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} does not fill bytes {start}:{end}")
    return Slot(dtype, shape, base + start, base + end)


def _view(buffer: mmap.mmap, slot: Slot) -> Tensor:
    count = math.prod(slot.shape)
    if not count:
        return torch.empty(slot.shape, dtype=slot.dtype)
    return torch.frombuffer(buffer, dtype=slot.dtype, count=count, offset=slot.start).view(slot.shape)


def refused(ref: WeightRef, reason: str, kind: type[WeightsRefused] = WeightsRefused) -> WeightsRefused:
    """What an engine says of a version that it does not take."""
    return kind(f"version {ref.version} of the weights refused: {ref.path}: {reason}")
