"""Train, validation and test: disjoint, and the same on every machine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headway.types import Split

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SHARES = (0.8, 0.1, 0.1)


def split_by_hash(keys: Sequence[str], seed: int) -> dict[Split, NDArray[np.int64]]:
    """Positions in `keys` of each split, 80/10/10 by hash of (seed, key), in hash order.

    A key keeps its split whatever the other keys are, and equal keys share theirs. Hash order makes the first
    n of a split a fair sample of it.
    """
    hashes = np.array([xxh3_64_intdigest(key.encode(), seed % 2**64) for key in keys], np.uint64)
    order = np.argsort(hashes, kind="stable")
    bounds = (np.cumsum(SHARES[:-1]) * 2.0**64).astype(np.uint64)
    parts = np.split(order, np.searchsorted(hashes[order], bounds))
    return dict(zip(SPLITS, parts, strict=True))
