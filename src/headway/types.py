"""What travels along the data path: plain frozen records of numpy arrays.

Lengths: P prompt tokens, T response tokens, m extra draws, k cached top tokens, L mixture-of-experts layers, E experts
chosen in each.
Arrays of one record share T and line up index by index; nothing here knows torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Experts = NDArray[np.signedinteger[Any]]
"""Expert ids, in the narrowest signed type that holds them: there are many."""

Split = Literal["train", "validation", "test"]
FinishReason = Literal["stop", "length", "interrupt"]

NO_VERSION = -1
"""The version of a token that no policy sampled (tool output)."""

LOGPROB_SLACK = 1e-4
"""A log-prob above 0 by no more than this is rounding; more is a fault."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. The same (split, index) always names the same question, so a cursor is enough to resume.

    Example: `Prompt(index=17, split="train", token_ids=np.array([5, 11, 6, 13], np.int32), data={"answer": "42"})`
    """

    index: int
    split: Split
    token_ids: Ints
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the grader needs; JSON-able."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine draws tokens.

    Example: `Sampling(max_tokens=8, seed=3, stop_token_ids=(2,))`: plain softmax sampling, at most 8 tokens.
    """

    max_tokens: int
    seed: int = 0
    """Names the request's own random stream: token t depends on (seed, t) and never on batch neighbors."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Waiting requests of a lower number start first; evaluation uses −1 so that it never queues behind rollouts."""
    num_draws: int = 0
    """Extra tokens drawn with replacement at each position from the same distribution (m)."""
    num_top: int = 0
    """How many of the most likely tokens to report at each position (k)."""
    record_routing: bool = False
    """Report the experts chosen in every mixture-of-experts layer, prompt included."""


@dataclass(frozen=True, slots=True)
class LogprobOrigin:
    """Where log-probs came from; two tensors of unlike origin are never compared unawares.

    Example: `LogprobOrigin(role="behavior", engine="torch", dtype="float32", temperature=1.0)`
    """

    role: Literal["behavior", "proximal", "ref", "teacher"]
    engine: str
    dtype: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class SideData:
    """Optional extras of sampled tokens; an absent one is None, never an empty array.

    Example: `SideData(draw_ids=np.zeros((5, 64), np.int32), draw_logprobs=np.zeros((5, 64), np.float32))`
    """

    draw_ids: Ints | None = None
    """`[T, m]`."""
    draw_logprobs: Floats | None = None
    """`[T, m]`, under the sampling distribution."""
    top_ids: Ints | None = None
    """`[T, k]`, most likely first."""
    top_logprobs: Floats | None = None
    """`[T, k]`."""
    kept_mass: Floats | None = None
    """`[T]`, probability that top-p/top-k left in the support before renormalizing; None when nothing was cut."""
    teacher_ids: Ints | None = None
    """`[T, k]`, most likely first under the teacher; only where the cache is the teacher's."""
    teacher_logprobs: Floats | None = None
    """`[T, 1 + K]`, the teacher's: of the token itself, then of the K cached ids (`headway.cache`)."""
    routing: Experts | None = None
    """`[P + T, L, E]`, experts chosen for every token of prompt and response; −1 in the last row, since the last token
    never enters the model."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """What a teacher says of the last T positions of a sequence.

    Example: `TeacherScores(logprobs=np.zeros((5, 64), np.float32))`: 64 queried ids at each of 5 positions.
    """

    logprobs: Floats
    """`[T, K]`, nats, at the queried ids."""
    top_ids: Ints | None = None
    """`[T, k]`, most likely first; None when no top was asked for."""
    top_logprobs: Floats | None = None
    """`[T, k]`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request: only tokens it sampled itself.

    Example (weights went from 4 to 5 after the first token):
    `Completion(token_ids=[9, 2], logprobs=[-.1, -.7], entropy=[.3, .9], versions=[4, 5], finish_reason="stop")`
    """

    token_ids: Ints
    versions: Ints
    finish_reason: FinishReason
    logprobs: Floats | None = None
    """`[T]`, nats, under the distribution that was sampled (after temperature and truncation)."""
    entropy: Floats | None = None
    """`[T]`, nats, of that distribution over the full vocabulary."""
    side: SideData = field(default_factory=SideData)


@dataclass(frozen=True, slots=True)
class Response:
    """Everything after the prompt in one episode: sampled tokens, and tool output between them.

    Example (a tool answered "42" in the middle):
    `token_ids=[8, 3, 42, 9, 2]`, `mask=[1, 1, 0, 1, 1]`, `versions=[4, 4, -1, 5, 5]`
    """

    token_ids: Ints
    mask: Bools
    """True on tokens the policy sampled."""
    versions: Ints
    """Policy version that sampled each token, −1 where `mask` is False."""
    reward: float
    behavior_logprobs: Floats | None = None
    """`[T]`, 0 where `mask` is False."""
    behavior_entropy: Floats | None = None
    """`[T]`, 0 where `mask` is False."""
    proximal_logprobs: Floats | None = None
    """`[T]`, nats, of the training side's stand-in for the policy that sampled; 0 where `mask` is False. While the
    response waits in the ledger, NaN at a token that is still to be scored."""
    origin: LogprobOrigin | None = None
    side: SideData = field(default_factory=SideData)
    num_turns: int = 1
    truncated: bool = False
    """The token limit ended the episode."""

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled."""
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token. Raises ValueError on a response without any."""
        return int(self.versions[self.mask].min())

    @property
    def newest_version(self) -> int:
        """Version of the newest sampled token. Raises ValueError on a response without any."""
        return int(self.versions[self.mask].max())


@dataclass(frozen=True, slots=True)
class Group:
    """The responses to one prompt, whole: a baseline over part of a group is biased.

    Example: `Group(group_id=12, prompt=prompt, responses=(r0, r1, r2, r3))`
    """

    group_id: int
    """Order of issue, 0, 1, 2, …: also the cursor of the prompt source."""
    prompt: Prompt
    responses: tuple[Response, ...]

    @property
    def rewards(self) -> list[float]:
        """`[G]`, in the order of `responses`."""
        return [r.reward for r in self.responses]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token of any member."""
        return min(r.oldest_version for r in self.responses)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step consumes: whole groups, and the version it is about to improve.

    Example: `Batch(step=7, policy_version=7, groups=(g3, g5))` trains version 7 into version 8.
    """

    step: int
    policy_version: int
    groups: tuple[Group, ...]

    @property
    def responses(self) -> list[Response]:
        """All responses, group after group."""
        return [r for g in self.groups for r in g.responses]


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A published set of parameters: where it lies and how to know it arrived whole.

    Example: `WeightRef(version=5, path="…/weights/v5.safetensors", checksum="9f3c…")`
    """

    version: int
    path: str
    checksum: str
    """xxh3-64 of the file's bytes, hexadecimal."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine's own account of itself.

    Example: `EngineStatus(version=5, num_active=60, num_waiting=12, num_tokens=91_000, busy_s=8.1, up_s=9.0)`
    """

    version: int
    num_active: int
    num_waiting: int
    num_tokens: int
    """Tokens sampled since start."""
    busy_s: float
    """Seconds with unfinished requests since start."""
    up_s: float
    """Seconds since start."""
    num_steps: int = 0
    """Decode steps since start; tokens over steps is how many sequences it decodes together."""
    num_plain_steps: int = 0
    """Of these, those that no request joined: the others take a pass to prefill, too."""
    num_plain_tokens: int = 0
    """Sampled in plain steps."""
    plain_s: float = 0.0
    """Seconds that plain steps took."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the learner says of one optimizer step: metric name to value, documented in docs/metrics.md."""

    step: int
    policy_version: int
    """The version that was trained; the step made `policy_version + 1`."""
    metrics: Mapping[str, float]
    profiles: Mapping[str, Any] = field(default_factory=dict)
    """What is no single number: name to plain JSON data, for the record of the step alone."""
