"""What an environment worker and the run say to each other; a frame with the token, then one of these a frame."""

from typing import Any

import msgspec

from headway.types import Split


class Step(msgspec.Struct, frozen=True, tag=True):
    """The policy has said `text` in an episode; answered in `Judged`."""

    id: int
    episode: int
    """Chosen by the client."""
    is_first: bool
    """Begins it: a worker that does not know a later step's episode has been started anew, and says so."""
    split: Split
    index: int
    """Of the prompt."""
    text: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by a `Judged` that says nothing, as soon as no step holds the worker up."""

    id: int


Asked = Step | Ping


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The worker turns to a step: if it dies or stands still now, this is the one.

    A process that dies within a millisecond may not get it out; the step before is then held for the one.
    """

    id: int


class Judged(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The environment's answer, or why there is none."""

    id: int = -1
    reward: float = 0.0
    observation: str | None = None
    error: str | None = None
    """What the environment raised; with id −1 why nothing of this client is served."""


Said: Any = Begun | Judged


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker builds its environment; travels as JSON in the environment variable HEADWAY_ENVIRONMENT."""

    name: str
    options: dict[str, Any]
    tokenizer: str
    """A folder with one."""
    episode_timeout_s: float
    """An episode older than this has been given up."""
