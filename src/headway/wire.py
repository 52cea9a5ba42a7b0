"""Records as bytes: msgpack, with arrays as (dtype, shape, bytes). Never pickle.

`encode(obj) -> bytes` and `decode(data, type) -> obj` serve the sockets, the ledger and the recorded batches alike.
Decoding checks every field's type and every array's dtype and size; bad bytes raise `msgspec.DecodeError`
or `msgspec.ValidationError`, both `msgspec.MsgspecError`.
"""

import math
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "float32", "float64", "bool")}


def encode(obj: Any) -> bytes:
    """Any record of `headway.types`, or plain data holding arrays, as msgpack bytes."""
    return msgspec.msgpack.encode(obj, enc_hook=_encode_array)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Inverse of `encode`. Raises msgspec.MsgspecError when the bytes are not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    # A field annotated NDArray[np.int32] arrives as a generic alias of ndarray.
    if (get_origin(kind) or kind) is not np.ndarray:
        raise TypeError(f"cannot decode {kind}")
    name, shape, raw = msgspec.convert(value, tuple[str, list[int], bytes])
    if name not in _DTYPES:
        raise ValueError(f"array of dtype {name!r} refused; allowed: {', '.join(_DTYPES)}")
    if any(n < 0 for n in shape) or math.prod(shape) * _DTYPES[name].itemsize != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {name} does not fit its {len(raw)} bytes")
    # A copy, so that the array owns aligned writable memory and the message can be freed.
    return np.frombuffer(raw, _DTYPES[name]).reshape(shape).copy()
