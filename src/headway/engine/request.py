"""A request to the engine, checked before it takes a slot."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.types import LogprobOrigin, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """What is waiting for a slot."""

    id: Any
    token_ids: NDArray[np.int64]
    sampling: Sampling


def make_request(
    request_id: Any, token_ids: Any, sampling: Sampling, *, vocab_size: int, max_length: int, is_sparse: bool
) -> Request:
    """Raises ValueError naming the request, the value and the limit."""
    ids = np.asarray(token_ids)
    name = f"request {request_id!r}"
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name}: needs a prompt of one or more token ids, got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{name}: token id {bad} is outside the vocabulary of {vocab_size}")
    if problem := _sampling_problem(sampling, vocab_size, is_sparse):
        raise ValueError(f"{name}: {problem}")
    if ids.size + sampling.max_tokens > max_length:
        raise ValueError(
            f"{name}: {ids.size} prompt tokens + max_tokens {sampling.max_tokens} "
            f"exceed the engine's max_length of {max_length}"
        )
    return Request(request_id, ids.astype(np.int64), sampling)


def _sampling_problem(s: Sampling, vocab_size: int, is_sparse: bool) -> str | None:
    limits = (
        (s.max_tokens >= 1, f"max_tokens must be at least 1, got {s.max_tokens}"),
        (0 <= s.temperature < float("inf"), f"temperature must be finite and at least 0, got {s.temperature}"),
        (0 < s.top_p <= 1, f"top_p must be in (0, 1], got {s.top_p}"),
        (s.top_k >= 0, f"top_k must be at least 0 (0 keeps all), got {s.top_k}"),
        (s.num_draws >= 0, f"num_draws must be at least 0, got {s.num_draws}"),
        (0 <= s.num_top <= vocab_size, f"num_top must be in [0, vocabulary size {vocab_size}], got {s.num_top}"),
        (all(0 <= t < vocab_size for t in s.stop_token_ids), f"stop_token_ids outside the vocabulary of {vocab_size}"),
        (is_sparse or not s.record_routing, "record_routing needs a mixture of experts; this model is dense"),
    )
    return next((problem for holds, problem in limits if not holds), None)


def origin_of(sampling: Sampling, *, engine: str, dtype: str) -> LogprobOrigin:
    """What log-probs of a request are taken under; greedy requests report the plain distribution."""
    greedy = sampling.temperature == 0
    return LogprobOrigin(
        role="behavior",
        engine=engine,
        dtype=dtype,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
    )
