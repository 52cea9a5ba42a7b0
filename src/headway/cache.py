"""Which ids a distillation cache holds at each response token: only these are scored, stored and trained on.

Column 0 is always the token itself; what follows depends on the kind:

- `draws`: the engine's m − 1 extra draws from the distribution that the token came from;
- `student_topk`: the k ids most likely under the policy that rolled out;
- `teacher_topk`: the k ids most likely under the teacher, which names them.
"""

from typing import Literal

import numpy as np

from headway.types import Floats, Ints, Response

CacheKind = Literal["draws", "student_topk", "teacher_topk"]


def student_ids(kind: CacheKind, response: Response, width: int | None = None) -> Ints:
    """`[T, 1 + K]`, the ids a teacher is asked about: the token, and what the engine cached beside it.

    `width`: 1 + K; the engine may report more of the most likely ids, for an entropy bound. None: all it cached.
    """
    beside = {"draws": response.side.draw_ids, "student_topk": response.side.top_ids, "teacher_topk": None}[kind]
    return _beside(response.token_ids, beside, np.int32)[:, :width]


def cached_ids(kind: CacheKind, response: Response) -> Ints:
    """`[T, 1 + K]`, the ids that `SideData.teacher_logprobs` speaks of."""
    scores = response.side.teacher_logprobs
    if kind == "teacher_topk":
        return _beside(response.token_ids, response.side.teacher_ids, np.int32)
    return student_ids(kind, response, None if scores is None else scores.shape[1])


def rollout_logprobs(kind: CacheKind, response: Response) -> Floats | None:
    """`[T, 1 + K]`, log p_old at the draws; None where the cache is no sample of p_old, or the engine gave none."""
    if kind != "draws" or response.behavior_logprobs is None:
        return None
    return _beside(response.behavior_logprobs, response.side.draw_logprobs, np.float32)


def bytes_per_token(kind: CacheKind, width: int) -> int:
    """Bytes that one position of a cache `width` ids wide travels with: ids and log-probs, 4 each.

    Draws carry their rollout log-probs too. The full vocabulary V would be 4·V: its ids need no naming.
    """
    return width * (12 if kind == "draws" else 8)


def _beside(first: np.ndarray, others: np.ndarray | None, dtype: type) -> np.ndarray:
    columns = [np.asarray(first, dtype)[:, None]]
    return np.concatenate(columns if others is None else [*columns, others.astype(dtype)], axis=1)
