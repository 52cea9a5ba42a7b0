"""Records as bytes: msgpack, with arrays as (dtype, shape, bytes). Never pickle.

`encode(obj) -> bytes` and `decode(data, type) -> obj` serve the sockets, the ledger and the recorded batches alike.
Decoding checks every field's type and every array's kind and size, and allocates no more than the bytes it is given.
Bad bytes raise `msgspec.DecodeError` or `msgspec.ValidationError`, both `msgspec.MsgspecError`, and nothing else.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

T = TypeVar("T")

MAX_DIMENSIONS = 8

_Array = tuple[str, list[int], bytes]

_DTYPES = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "float32", "float64", "bool")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # numpy makes a dtype's name anew, in Python, when asked


def encode(obj: Any) -> bytes:
    """Any record of `headway.types`, or plain data holding arrays, as msgpack bytes."""
    return msgspec.msgpack.encode(obj, enc_hook=_encode_array)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Inverse of `encode`. Raises msgspec.MsgspecError when the bytes are not a `kind`."""
    with _only_msgspec_errors():
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Plain data from JSON that another program wrote. Raises msgspec.MsgspecError when it is not a `kind`."""
    with _only_msgspec_errors():
        return msgspec.json.decode(data, type=kind)


@contextmanager
def _only_msgspec_errors() -> Iterator[None]:
    try:
        yield
    except (RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_NAMES.get(value.dtype) or value.dtype.name, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    # A field annotated NDArray[np.int32] arrives as a generic alias of ndarray.
    if (get_origin(kind) or kind) is not np.ndarray:
        raise TypeError(f"cannot decode {kind}")
    name, shape, raw = msgspec.convert(value, _Array)
    if name not in _DTYPES:
        raise ValueError(f"array of dtype {name!r} refused; allowed: {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    if not issubclass(dtype.type, wanted := _kind_of(kind)):
        raise ValueError(f"array of dtype {name} where {wanted.__name__} belongs")
    # Every length on its own, too: beside a 0 the product says nothing of the others.
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= n <= max(len(raw), _MAX_EMPTY) for n in shape):
        raise ValueError(f"array of shape {str(shape)[:80]} makes no sense")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {name} does not fit its {len(raw)} bytes")
    if dtype == np.bool_ and raw.translate(None, b"\0\1"):
        raise ValueError("array of dtype bool holds bytes other than 0 and 1")
    # A copy, so that the array owns aligned writable memory and the message can be freed.
    return np.frombuffer(raw, dtype).reshape(shape).copy()


_MAX_EMPTY = 1 << 20
"""Longest axis of an array without elements, such as the draws of a response that was interrupted at once."""


@lru_cache
def _kind_of(annotation: Any) -> type[np.generic]:
    """The kind of scalar an annotation asks for, of any width: `np.signedinteger` of NDArray[np.int32]."""
    dtype = get_args(annotation)[1:]
    scalar = get_args(dtype[0])[0] if dtype and get_args(dtype[0]) else np.generic
    scalar = get_origin(scalar) or scalar
    return next((kind for kind in (np.bool_, np.signedinteger, np.floating) if issubclass(scalar, kind)), np.generic)
