"""Sequences whose tokens are scored version by version, each under the parameters that sampled it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from headway.errors import HeadwayError
from headway.proximal.scorer import Piece, Scorer
from headway.types import NO_VERSION, Batch, Floats, Group, Ints, Response


class MissingLogprobs(HeadwayError, RuntimeError):
    """A token that trains has no proximal log-prob; the message names the sample, the version and the mend."""


@dataclass(slots=True)
class Sample:
    """One sequence, who sampled what of it, and the log-probs found so far.

    Example: prompt [5, 6], then 9 by version 3 (scored) and 2 by version 4 (not yet):
    `Sample(token_ids=[5, 6, 9, 2], versions=[-1, -1, 3, 4], scores=[nan, nan, -.1, nan])`
    """

    token_ids: Ints
    """`[P + T]`."""
    versions: Ints
    """`[P + T]`, −1 on tokens that need no score."""
    scores: Floats
    """`[P + T]`, nats; NaN until scored."""

    @classmethod
    def of(cls, prompt_ids: Ints, response: Response) -> "Sample":
        """The tokens that train, with the scores that the response already carries."""
        before = len(prompt_ids)
        known = response.proximal_logprobs
        scores = np.full(len(response.mask), np.nan, np.float32) if known is None else known
        return cls(
            token_ids=np.concatenate([prompt_ids, response.token_ids]).astype(np.int32),
            versions=_behind(before, np.where(response.mask, response.versions, NO_VERSION), NO_VERSION, np.int32),
            scores=_behind(before, np.where(response.mask, scores, np.nan), np.nan, np.float32),
        )

    def unscored(self, version: int | None = None) -> Piece | None:
        """What still needs a score, of one version or of any: the sequence up to the last such token."""
        wanted = np.isnan(self.scores) & (self.versions >= 0)
        if version is not None:
            wanted &= self.versions == version
        if not wanted.any():
            return None
        end = int(np.flatnonzero(wanted)[-1]) + 1
        return Piece(self.token_ids[:end], wanted[:end])

    def fill(self, piece: Piece, logprobs: Floats) -> None:
        """Take in what was found for a piece of this sample."""
        self.scores[: len(logprobs)][piece.wanted] = logprobs[piece.wanted]


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """In the order of the groups' responses."""
    return [Sample.of(group.prompt.token_ids, response) for group in groups for response in group.responses]


def fill(
    samples: Sequence[Sample], scorer: Scorer, parameters: Mapping[str, Tensor] | None, version: int | None = None
) -> int:
    """Score what is unscored (of one version) under `parameters`, None: the live ones. Returns how many samples."""
    waiting = [(sample, piece) for sample in samples if (piece := sample.unscored(version)) is not None]
    found = scorer.score([piece for _, piece in waiting], parameters)
    for (sample, piece), logprobs in zip(waiting, found, strict=True):
        sample.fill(piece, logprobs)
    return len(waiting)


def unscored_versions(samples: Iterable[Sample]) -> list[int]:
    """Versions with unscored tokens, ascending."""
    versions = {int(v) for s in samples for v in np.unique(s.versions[np.isnan(s.scores)])}
    return sorted(versions - {NO_VERSION})


def known_scores(response: Response, sample: Sample) -> Response:
    """The response with what is known of its log-probs: 0 where nothing trains, NaN where a score is missing."""
    scores = sample.scores[len(sample.token_ids) - len(response.token_ids) :]
    return replace(response, proximal_logprobs=np.where(response.mask, scores, np.float32(0)))


def complete(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """The batch with proximal log-probs on every response. Raises MissingLogprobs where a token lacks one."""
    each = iter(samples)
    groups = tuple(
        replace(group, responses=tuple(known_scores(response, next(each)) for response in group.responses))
        for group in batch.groups
    )
    for group in groups:
        for member, response in enumerate(group.responses):
            _require_all(group.group_id, member, response)
    return replace(batch, groups=groups)


def _require_all(group_id: int, member: int, response: Response) -> None:
    assert response.proximal_logprobs is not None
    missing = np.flatnonzero(np.isnan(response.proximal_logprobs))
    if len(missing):
        raise MissingLogprobs(
            f"group {group_id}, member {member}: {len(missing)} tokens have no proximal log-prob, the first at "
            f"{missing[0]}, sampled by version {response.versions[missing[0]]}, whose parameters are gone; "
            "resume from an older checkpoint, or start a new run"
        )


def _behind(before: int, values: np.ndarray, fill: float, dtype: type) -> np.ndarray:
    return np.concatenate([np.full(before, fill), values]).astype(dtype)
