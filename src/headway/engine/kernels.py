"""The decoder's own attention on CPU in float32: one new token a row, and each row costs its own length.

A library's products take all rows as long as the longest and pay anew for every row and head; here storage, scores,
softmax and mixing of a head are one pass over its keys and values. The kernel is compiled when this module is imported,
which takes some seconds once: machine code is kept in `cache_directory()`, apart for each state of this file, each
numba and each processor.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name
from numba.core import config
from numpy.typing import NDArray

from headway.models.cache_directory import cache_directory

Floats = NDArray[np.float32]

# Sums may be reordered, or they would stay scalar. NaN and infinity keep their meaning: the engine has to see them.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}


@numba.njit(**_OPTIONS)
def _score(q: Floats, p: Floats, keys: Floats, first: Floats, second: Floats, length: int) -> None:
    """first[j] = Σ_d q[d] · keys[d, j], second with p; four d at a time: a loop's start costs as much as its rounds."""
    first[:length] = 0
    second[:length] = 0
    for d in range(0, q.shape[0], 4):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        p0, p1, p2, p3 = p[d], p[d + 1], p[d + 2], p[d + 3]
        for j in range(length):
            k0, k1, k2, k3 = keys[d, j], keys[d + 1, j], keys[d + 2, j], keys[d + 3, j]
            first[j] += q0 * k0 + q1 * k1 + q2 * k2 + q3 * k3
            second[j] += p0 * k0 + p1 * k1 + p2 * k2 + p3 * k3


@numba.njit(**_OPTIONS)
def _softmax(x: Floats, bits: NDArray[np.int32], length: int) -> None:
    """x = exp(x − max x) / Σ exp(x − max x) over the first `length`, in place; `bits` is room for as many integers.

    exp(y) = 2^n · exp(r), n = round(y / ln 2): the polynomial of Cephes' expf for exp(r), and 2^n by its bits, so that
    the loops call nothing and compile to vector instructions. From e^−88 on down, 2^n and with it the weight is 0.
    """
    top = x[0]
    for j in range(1, length):
        top = max(top, x[j])
    for j in range(length):
        y = x[j] - top
        y = np.float32(-88) if y < np.float32(-88) else y  # NaN stays NaN
        n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = y - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[j] = p * r * r + r + np.float32(1)
        bits[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    powers, total = bits.view(np.float32), np.float32(0)
    for j in range(length):
        x[j] *= powers[j]
        total += x[j]
    share = np.float32(1) / total
    for j in range(length):
        x[j] *= share


@numba.njit(**_OPTIONS)
def _mix(first: Floats, second: Floats, values: Floats, out: Floats, other: Floats, length: int) -> None:
    """out[d] = Σ_j first[j] · values[j, d], other with second; four j at a time."""
    out[:] = 0
    other[:] = 0
    whole = length // 4 * 4
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = first[j], first[j + 1], first[j + 2], first[j + 3]
        u0, u1, u2, u3 = second[j], second[j + 1], second[j + 2], second[j + 3]
        for d in range(out.shape[0]):
            v0, v1, v2, v3 = values[j, d], values[j + 1, d], values[j + 2, d], values[j + 3, d]
            out[d] += w0 * v0 + w1 * v1 + w2 * v2 + w3 * v3
            other[d] += u0 * v0 + u1 * v1 + u2 * v2 + u3 * v3
    for j in range(whole, length):
        for d in range(out.shape[0]):
            out[d] += first[j] * values[j, d]
            other[d] += second[j] * values[j, d]


def _attend(qk: Floats, v: Floats, positions: NDArray[np.int64], keys: Floats, values: Floats, out: Floats) -> None:
    """Store each row's new key and value at its position, then out = softmax(q · K) V over columns 0 … position.

    qk `[n, kv, group + 1, D]`: for each key head its queries, scaled, then itself; v `[n, kv, D]`; positions `[n]`;
    keys `[rows, kv, D, columns]`, values `[rows, kv, columns, D]`; out `[n, kv, group, D]`. D is a multiple of 4.
    """
    num, kv, dim = v.shape
    group, columns = qk.shape[2] - 1, values.shape[2]
    first, second, bits = np.empty(columns, np.float32), np.empty(columns, np.float32), np.empty(columns, np.int32)
    in_vain = np.empty(dim, np.float32)
    for row in range(num):
        at = positions[row]
        for head in range(kv):
            for d in range(dim):
                keys[row, head, d, at] = qk[row, head, group, d]
                values[row, head, at, d] = v[row, head, d]
            # Two queries at once read their keys and values half as often; a last one alone goes twice, once in vain.
            for one in range(0, group, 2):
                other = min(one + 1, group - 1)
                target = out[row, head, other] if other > one else in_vain
                _score(qk[row, head, one], qk[row, head, other], keys[row, head], first, second, at + 1)
                _softmax(first, bits, at + 1)
                if other > one:
                    _softmax(second, bits, at + 1)
                _mix(first, second, values[row, head], out[row, head, one], target, at + 1)


def _compiled(function: Callable[..., None], signature: str) -> Any:
    """The function as machine code. Kept code that cannot be written or read costs the time to compile, not a run."""
    elsewhere: str = config.CACHE_DIR  # type: ignore[attr-defined]
    try:
        state = [Path(__file__).read_bytes(), numba.__version__, get_host_cpu_name()]
        folder = cache_directory() / "kernels" / hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # where it cannot write, numba would keep the code elsewhere without a word
        config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
        return numba.njit(signature, **_OPTIONS, cache=True)(function)
    except Exception:  # kept code can be damaged in any way; a fault of the function itself is raised again here
        return numba.njit(signature, **_OPTIONS)(function)
    finally:
        config.CACHE_DIR = elsewhere  # type: ignore[attr-defined]


attend = _compiled(_attend, "void(float32[:,:,:,::1], float32[:,:,::1], int64[::1]" + 3 * ", float32[:,:,:,::1]" + ")")
