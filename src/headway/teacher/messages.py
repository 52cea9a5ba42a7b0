"""What a teacher's server and its client say to each other; a frame with the token, then one of these a frame."""

from typing import Literal

import msgspec

from headway.types import Ints, TeacherScores


class Score(msgspec.Struct, frozen=True):
    """Score the last T positions; answered in `Scored`."""

    id: int
    token_ids: Ints
    query_ids: Ints
    """`[T, K]`."""
    num_top: int = 0


class Scored(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one request: scores, or why not. `busy_s`: seconds the teacher has computed since its start."""

    id: int = -1
    scores: TeacherScores | None = None
    refused: str | None = None
    """Why this request, or with id −1 everything this client sends, is not served."""
    busy_s: float = 0.0


class TeacherSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server builds its teacher; travels as JSON in the environment variable HEADWAY_TEACHER."""

    model: str
    """A model's folder or hub id."""
    student_vocab_size: int
    """Ids from here on are never reported as the teacher's top: they are padding of its head."""
    temperature: float = 1.0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: int = 1
    batch_tokens: int = 8192
