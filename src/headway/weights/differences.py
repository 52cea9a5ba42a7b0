"""The bit-exact difference of two versions of a tensor in few bytes: pure functions over words.

A word is the bits of one element as an integer. The step of a word is new − old modulo 2^bits, folded so that small
steps in either direction become small numbers (0, −1, 1, −2 … → 0, 1, 2, 3 …). Floats of one sign are ordered like
their words, so a small update is a small step and its upper bytes are zero: bytes of like weight are put side by side
(planes) before zstandard sees them.

    sparse: planes of the gaps between changed words, then planes of their steps
    dense:  planes of the steps of all words
"""

from typing import Any, Literal

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

Encoding = Literal["sparse", "dense"]
Words = NDArray[np.signedinteger[Any]]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LEVEL = 1
"""Of zstandard: higher ones take several times as long for a few percent."""


def words(tensor: Tensor) -> Words:
    """The elements' bits, flat, on the host; a view where the tensor is contiguous there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(_WORDS[flat.element_size()]).numpy()


def encode(old: Words, new: Words) -> tuple[Encoding, int, bytes]:
    """(encoding, number of words that changed, payload), the smaller of the two encodings; no payload if none did."""
    steps = _fold(new - old)
    changed = np.flatnonzero(steps)
    if not changed.size:
        return "sparse", 0, b""
    sparse = None
    if changed.size * 4 < new.size:  # beyond that the gaps alone outweigh what is saved
        gaps = np.diff(changed, prepend=-1).astype(_gap_dtype(new.size))
        sparse = _compress(np.concatenate([_planes(gaps), _planes(steps[changed])]))
    if sparse is not None and changed.size * 64 < new.size:
        return "sparse", changed.size, sparse
    dense = _compress(_planes(steps))
    if sparse is not None and len(sparse) <= len(dense):
        return "sparse", changed.size, sparse
    return "dense", changed.size, dense


def apply(old: Words, encoding: Encoding, num_changed: int, payload: bytes | memoryview) -> Words:
    """The new words, in memory of their own. Raises ValueError when the payload is no difference of so many words."""
    if encoding == "dense":
        planes = _decompress(payload, old.nbytes)
        return old + _unfold(_merge(planes, old.itemsize))
    if num_changed > old.size:
        raise ValueError(f"{num_changed} words of {old.size} are said to have changed")
    gap_type = _gap_dtype(old.size)
    planes = _decompress(payload, num_changed * (gap_type.itemsize + old.itemsize))
    gap_bytes = num_changed * gap_type.itemsize
    places = np.cumsum(_merge(planes[:gap_bytes], gap_type.itemsize), dtype=np.int64) - 1
    if num_changed and (places[-1] >= old.size or (np.diff(places, prepend=-1) <= 0).any()):
        raise ValueError(f"the places of the changed words lie outside the tensor of {old.size}")
    new = old.copy()
    new[places] += _unfold(_merge(planes[gap_bytes:], old.itemsize))
    return new


def _gap_dtype(num_words: int) -> "np.dtype[Any]":
    return np.dtype(np.uint32 if num_words < 2**32 else np.uint64)


def _fold(steps: Words) -> NDArray[np.unsignedinteger[Any]]:
    bits = steps.itemsize * 8
    return ((steps << 1) ^ (steps >> (bits - 1))).view(f"u{steps.itemsize}")


def _unfold(folded: NDArray[np.unsignedinteger[Any]]) -> Words:
    return ((folded >> 1) ^ np.negative(folded & 1)).view(f"i{folded.itemsize}")


def _planes(values: NDArray[Any]) -> NDArray[np.uint8]:
    planes = np.empty((values.itemsize, values.size), np.uint8)
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    for i, plane in enumerate(planes):  # a plane at a time: four times as fast as transposing at once
        plane[:] = columns[:, i]
    return planes.reshape(-1)


def _merge(planes: NDArray[np.uint8], itemsize: int) -> NDArray[np.unsignedinteger[Any]]:
    columns = np.empty((planes.size // itemsize, itemsize), np.uint8)
    for i, plane in enumerate(planes.reshape(itemsize, -1)):
        columns[:, i] = plane
    return columns.reshape(-1).view(f"u{itemsize}")


def _compress(planes: NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)


def _decompress(payload: bytes | memoryview, size: int) -> NDArray[np.uint8]:
    # Asked first: a frame that claims more than fits must not be unpacked.
    try:
        claimed = zstandard.frame_content_size(payload)
        if claimed != size:
            raise ValueError(f"a payload unpacks to {claimed} bytes instead of {size}")
        unpacked = zstandard.ZstdDecompressor().decompress(payload) if size else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"a payload does not unpack: {error}") from error
    return np.frombuffer(unpacked, np.uint8)
