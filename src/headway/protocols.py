"""The seams between rooms. A component knows these shapes and never its owner."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from headway.errors import HeadwayError
from headway.types import (
    Batch,
    Completion,
    EngineStatus,
    Ints,
    LogprobOrigin,
    Prompt,
    Response,
    Sampling,
    Split,
    StepReport,
    TeacherScores,
    WeightRef,
)


class Engine(Protocol):
    """Samples tokens with some version of the policy. Token-in, token-out."""

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        """Continue `token_ids`. Returns early with `finish_reason="interrupt"` when interrupted.

        The caller continues a partial response by asking again with the tokens so far.
        Raises EngineDied, RequestRefused, NotFinite.
        """
        ...

    async def update_weights(self, ref: WeightRef) -> None:
        """Swap in flight; returns when every later token will carry `ref.version`. Raises WeightsRefused."""
        ...

    async def interrupt(self) -> None:
        """Make every unfinished `generate` return what it has."""
        ...

    async def status(self) -> EngineStatus: ...

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        """What `Completion.logprobs` were taken under."""
        ...


class EngineDied(ConnectionError):
    """The engine's process is gone; what it was generating is lost and must be asked for again."""


class NotFinite(HeadwayError, FloatingPointError):
    """The model's output for a request was NaN or infinite."""


class RequestRefused(ValueError):
    """The engine cannot serve this request as asked (too long, bad token, bad sampling); asking again is no use."""


class WeightsRefused(HeadwayError, ValueError):
    """A published version did not arrive whole; the previous one is still in use."""


class DeliveryFailed(WeightsRefused):
    """This engine cannot use a version as it was sent, but its channel knows another way to send it."""


class WeightChannel(Protocol):
    """Carries versions of the parameters from learner to engines."""

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Write all tensors atomically. The previous version stays, and so do those `in_use` by engines that lag."""
        ...

    async def deliver(self, ref: WeightRef, engine: Engine) -> int:
        """Bring one engine to a published version; the version it then holds, which may be a newer one.

        Raises WeightsRefused, and what the engine raises.
        """
        ...

    def close(self) -> None: ...


class Learner(Protocol):
    """Owns the parameters and the optimizer; one call is one optimizer step."""

    @property
    def policy_version(self) -> int: ...

    def train(self, batch: Batch) -> StepReport:
        """Step from `batch.policy_version` to the next version. Deterministic: same state and batch, same bits."""
        ...

    def accumulate(self, batch: Batch) -> None:
        """The first half of `train`: everything that still needs the parameters of `batch.policy_version`."""
        ...

    def step(self) -> StepReport:
        """The second half: change the parameters."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Current parameters by their Hugging Face names; valid until the next `train`."""
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class Episode(Protocol):
    """One attempt at one prompt; single use."""

    async def step(self, text: str) -> "Turn":
        """Take what the policy just said (decoded, special tokens removed); say what happens next."""
        ...


class Turn(Protocol):
    """The environment's answer to one turn of the policy."""

    @property
    def reward(self) -> float:
        """Added to the episode's reward."""
        ...

    @property
    def observation(self) -> str | None:
        """Tool or user message to show before the next turn; None ends the episode."""
        ...


class Environment(Protocol):
    """A task: an indexed source of prompts, and the judge of what is answered."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of the policy."""
        ...

    def size(self, split: Split) -> int:
        """Number of distinct prompts; indices run from 0 to size − 1. Splits are disjoint."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Pure: the same arguments always give the same prompt."""
        ...

    def start(self, prompt: Prompt) -> Episode: ...

    def observe(self, text: str, after_stop: bool) -> Ints:
        """Token ids that show an observation and open the next turn.

        They follow the sampled tokens as they stand; nothing the policy said is tokenized again.
        `after_stop`: the policy has already closed its own message with a stop token.
        """
        ...


@runtime_checkable
class SupervisedEnvironment(Environment, Protocol):
    """An environment that knows right answers, which a tiny model is cold-started on."""

    def examples(self, split: Split) -> list[tuple[Ints, Ints]]:
        """(prompt ids, answer ids with the end-of-text token) of a split, or of a fair sample of a large one."""
        ...


class Teacher(Protocol):
    """Scores tokens with another model, for distillation. Calls wait out its deaths and restarts."""

    async def score(self, token_ids: Ints, query_ids: Ints, num_top: int) -> TeacherScores:
        """log q at the queried ids `[T, K]` of the last T positions of `token_ids`, and the teacher's own top.

        Raises RequestRefused for a request it cannot serve, TeacherLost when it keeps failing.
        """
        ...

    async def run(self) -> None:
        """Keep the teacher alive until canceled. Raises TeacherLost when it keeps dying."""
        ...

    async def close(self) -> None: ...

    def describe(self) -> str:
        """Where it stands, for whoever waits for it."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds it has computed so far; 0 where nobody knows."""
        ...

    @property
    def num_retries(self) -> int:
        """Requests asked again because the teacher died or did not answer."""
        ...


class TeacherLost(HeadwayError, RuntimeError):
    """A teacher kept failing; the message says how, and what to change. The run can be resumed."""


class Finished(NamedTuple):
    """A finished response with log-probs found after it was stored; the stored one must be replaced."""

    group_id: int
    member: int
    response: Response


class ProximalSource(Protocol):
    """Supplies `proximal_logprobs`, the training-side stand-in for the policy that sampled.

    The learner's thread calls `complete`, `before_step`, `after_step` in this order at every step; a step that a
    resumed run trains again starts at `before_step`, for its batch carries the log-probs already.
    """

    def complete(self, batch: Batch) -> Batch:
        """The batch with `proximal_logprobs` on every response."""
        ...

    def before_step(self, version: int) -> Sequence[Finished]:
        """The learner still holds `version`: score or keep what will need it. Returns what to store again."""
        ...

    def after_step(self, batch: Batch, report: StepReport) -> Mapping[str, float]:
        """The learner holds the next version. Returns metrics of the step."""
        ...

    def save(self, directory: Path) -> None:
        """Write what a checkpoint must hold."""
        ...

    def load(self, directory: Path) -> None: ...
