"""The teacher's stage of an episode: what the student sampled goes out, and comes back with log-probs."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from headway.cache import CacheKind, student_ids
from headway.errors import HeadwayError
from headway.protocols import Teacher
from headway.types import LOGPROB_SLACK, Prompt, Response, TeacherScores

Score = Callable[[Prompt, Response], Awaitable[Response]]
"""Takes a finished episode, returns it with the teacher's log-probs."""


class BadScores(HeadwayError, ValueError):
    """A teacher broke its contract: scores of another shape, or that are no log-probs."""


async def score_response(
    prompt: Prompt, response: Response, *, teacher: Teacher, kind: CacheKind, num_top: int, width: int
) -> Response:
    """The response with `side.teacher_logprobs`, and `side.teacher_ids` where the cache is the teacher's own top.

    `num_top`: ids the teacher itself is to name. `width`: log-probs a position travels with, its token's included.
    Raises BadScores, RequestRefused, TeacherLost.
    """
    asked = student_ids(kind, response, width)
    scores = await teacher.score(np.concatenate([prompt.token_ids, response.token_ids]), asked, num_top)
    check_scores(scores, asked.shape, num_top, f"prompt {prompt.split}/{prompt.index}")
    return with_scores(response, scores)


def with_scores(response: Response, scores: TeacherScores) -> Response:
    """The response with what a teacher said of it in its side data."""
    columns = [scores.logprobs] if scores.top_logprobs is None else [scores.logprobs, scores.top_logprobs]
    side = replace(response.side, teacher_ids=scores.top_ids, teacher_logprobs=np.concatenate(columns, axis=1))
    return replace(response, side=side)


def check_scores(scores: TeacherScores, shape: tuple[int, ...], num_top: int, name: str) -> None:
    """Raises BadScores, beginning with `name`."""
    found = {"log-probs": (scores.logprobs, shape)}
    if num_top:
        found |= {"top ids": (scores.top_ids, (shape[0], num_top))}
        found |= {"top log-probs": (scores.top_logprobs, (shape[0], num_top))}
    for what, (values, expected) in found.items():
        if values is None or values.shape != expected:
            got = "none" if values is None else values.shape
            raise BadScores(
                f"{name}: the teacher gave {what} of shape {got}, expected {expected}; "
                "it must answer as headway.protocols.Teacher says"
            )
    for values in (scores.logprobs, scores.top_logprobs):
        if values is not None and not (np.isfinite(values) & (values <= LOGPROB_SLACK)).all():
            raise BadScores(
                f"{name}: the teacher gave a log-prob that is not a finite number <= 0; check the weights it loads: "
                'one that overflows in bfloat16 needs a new run with model.dtype = "float32"'
            )
