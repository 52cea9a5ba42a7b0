"""What the old-logit worker and its client say to each other, and what the worker starts with.

As with an engine: a frame with the token, then one of these structs by `headway.wire` a frame.
"""

from typing import Literal

import msgspec

from headway.types import Bools, Floats, Ints


class ScoreRequest(msgspec.Struct, frozen=True):
    """Score these pieces under the parameters of one version; answered with `Scored`."""

    id: int
    version: int
    token_ids: list[Ints]
    wanted: list[Bools]


class Scored(msgspec.Struct, frozen=True):
    """The answer to one request."""

    id: int
    logprobs: list[Floats] | None
    """None when the version is no longer kept."""
    seconds: float = 0.0
    """That the worker computed."""
    error: str | None = None
    """Why it could not."""


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker builds its model; travels as JSON in the environment variable HEADWAY_WORKER."""

    model: str
    """A model folder of the right architecture; its parameters are not used."""
    snapshots: str
    """The folder of `SnapshotStore`."""
    temperature: float
    micro_batch_tokens: int
    device: str = "cpu"
    autocast: Literal["float32", "bfloat16"] = "float32"
    num_threads: int = 1
