"""What an engine's server and its client say to each other, and the settings a server starts with.

What a client sends is a frame with its token, then frames with one of these structs each, by `headway.wire`, as many as
leave together. The server puts the client's name in front (zmq ROUTER).
"""

from typing import Literal

import msgspec

from headway.types import Completion, EngineStatus, Ints, Sampling, WeightRef


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Continue these tokens; answered in `Reply.finished`."""

    id: int
    token_ids: Ints
    sampling: Sampling


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a submission; never answered."""

    id: int


class Update(msgspec.Struct, frozen=True, tag=True):
    """Swap the weights in flight; answered in `Reply.done`."""

    id: int
    ref: WeightRef


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Finish every submission of every client with what it has; answered in `Reply.done` after them."""

    id: int


class Status(msgspec.Struct, frozen=True, tag=True):
    """Answered in `Reply.done`; the status itself comes with every reply."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit; never answered."""


Message = Submit | Cancel | Update | Interrupt | Status | Shutdown


class Finished(msgspec.Struct, frozen=True):
    """The end of one submission."""

    id: int
    completion: Completion


class Failed(msgspec.Struct, frozen=True):
    """A message that could not be obeyed: the name of the remote exception and its text."""

    id: int
    kind: str
    text: str


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything one client is told at once."""

    status: EngineStatus | None = None
    finished: list[Finished] = []
    failed: list[Failed] = []
    done: list[int] = []
    refused: str | None = None
    """Why nothing this client sends is obeyed."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server builds its engine; travels as JSON in the environment variable HEADWAY_ENGINE."""

    config: str
    """Path of a model's config.json or its folder."""
    max_slots: int
    max_length: int
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_threads: int = 1
    on_update: Literal["keep", "recompute", "interrupt"] = "keep"
    record_logprobs: bool = True
    record_entropy: bool = True
    record_routing: bool = False
    """SGLang must be told at its start whether any request will ask for the experts chosen."""
    round_weights: Literal["none", "bfloat16", "int8"] = "none"
    """What every parameter is rounded to when a version is loaded; see `headway.engine.rounding`."""
