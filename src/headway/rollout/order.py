"""Which prompt comes next: a pure function of the group's number, so that a cursor is all a resume needs."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def prompt_index(group_id: int, size: int, seed: int) -> tuple[int, int]:
    """`(epoch, index)` of the prompt of group `group_id` = 0, 1, 2, …

    epoch = group_id div size; index = permutation(seed, epoch)[group_id mod size], so every epoch visits each
    of the `size` prompts exactly once, in an order of its own.

    Raises ValueError for a negative id or an environment without prompts.
    """
    if group_id < 0:
        raise ValueError(f"group_id must be >= 0, got {group_id}")
    if size < 1:
        raise ValueError(f"the environment has {size} prompts in this split; at least 1 is needed")
    epoch, position = divmod(group_id, size)
    return epoch, int(_permutation(size, seed, epoch)[position])


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)
