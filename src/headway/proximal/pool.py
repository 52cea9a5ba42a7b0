"""`exact_interrupt`: tokens are scored at the end of the version that made them, while the learner still holds it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.errors import HeadwayError
from headway.protocols import Finished
from headway.proximal.samples import Sample, complete, fill, known_scores, unscored_versions
from headway.proximal.scorer import Scorer
from headway.proximal.source import Metrics
from headway.types import NO_VERSION, Batch, Completion, Ints, Response, StepReport


class BoundaryMissed(HeadwayError, RuntimeError):
    """A token outlived the version that made it without a score: a fault of the runtime, never of the user."""


@dataclass(slots=True)
class _Entry:
    """A sample in flight, and its response once it is finished."""

    sample: Sample
    group_id: int = -1
    member: int = -1
    response: Response | None = None


class Pool:
    """Old log-probs by sample, partial responses included.

    Written by the event loop (`sampled`, `finished`, `gone`); scored in the learner's thread, while no engine
    generates. A sample is known by the seed of its requests, the same in every attempt and after every interruption.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def sampled(self, seed: int, request: Ints, completion: Completion) -> None:
        """A request came back, whole or interrupted; the next one may hold tool output behind it."""
        entry = self._entries.get(seed)
        before = len(request)
        sample = entry.sample if entry is not None else Sample(request[:0], request[:0], np.zeros(0, np.float32))
        # What a failed attempt left is cut off: its successor asks from the prompt again.
        kept = min(before, len(sample.token_ids))
        shown, num = before - kept, len(completion.token_ids)
        self._entries[seed] = _Entry(
            Sample(
                token_ids=np.concatenate([request, completion.token_ids]).astype(np.int32),
                versions=np.concatenate(
                    [sample.versions[:kept], np.full(shown, NO_VERSION), completion.versions]
                ).astype(np.int32),
                scores=np.concatenate([sample.scores[:kept], np.full(shown + num, np.nan)]).astype(np.float32),
            )
        )

    def finished(self, seed: int, group_id: int, member: int, prompt_ids: Ints, response: Response) -> Response:
        """The response as it must be stored: with the scores found so far, NaN where there is none yet."""
        entry = self._entries.setdefault(seed, _Entry(Sample.of(prompt_ids, response)))
        entry.group_id, entry.member = group_id, member
        # The flag first, on the entry that is being scored: whoever scores it then hands the response over again.
        entry.response = response
        return known_scores(response, entry.sample)

    def gone(self, seeds: list[int]) -> None:
        """Samples that were trained or dropped."""
        for seed in seeds:
            self._entries.pop(seed, None)

    def sample(self, seed: int) -> Sample | None:
        """What is known of a sample."""
        entry = self._entries.get(seed)
        return None if entry is None else entry.sample

    def score(self, scorer: Scorer, version: int) -> tuple[int, list[Finished]]:
        """Score what `version` made: the number of samples scored, and the finished among them.

        Newer tokens, which only a resumed run has before it catches up, wait for their own boundary.
        Raises BoundaryMissed when a token is older.
        """
        entries = [e for e in list(self._entries.values()) if e.sample.unscored(version) is not None]
        versions = unscored_versions(e.sample for e in entries)
        if versions and versions[0] < version:
            raise BoundaryMissed(f"tokens of version {versions[0]} have no score at the end of version {version}")
        num = fill([e.sample for e in entries], scorer, None, version)
        finished = [
            Finished(e.group_id, e.member, known_scores(e.response, e.sample))
            for e in entries
            if e.response is not None
        ]
        return num, finished

    @property
    def num_bytes(self) -> int:
        """Of tokens, versions and scores."""
        samples = [entry.sample for entry in list(self._entries.values())]
        return sum(s.token_ids.nbytes + s.versions.nbytes + s.scores.nbytes for s in samples)


class InterruptSource:
    """Scores the batch's newest tokens with the learner's parameters and finds all older ones in the pool.

    `seed_of(group_id, member)` names a sample in the pool.
    """

    def __init__(self, scorer: Scorer, pool: Pool, *, seed_of: Callable[[int, int], int]) -> None:
        self._scorer, self._pool, self._seed_of = scorer, pool, seed_of
        self._metrics: dict[str, float] = {}

    def complete(self, batch: Batch) -> Batch:
        """Raises MissingLogprobs."""
        begun = time.monotonic()
        samples = []
        for group in batch.groups:
            for member, response in enumerate(group.responses):
                known = self._pool.sample(self._seed_of(group.group_id, member))
                if known is not None:
                    response = known_scores(response, known)
                samples.append(Sample.of(group.prompt.token_ids, response))
        num_rows = fill(samples, self._scorer, None, batch.policy_version)
        self._metrics = {
            "proximal_s": time.monotonic() - begun,
            "proximal_shards": 1.0,
            "proximal_rows": float(num_rows),
        }
        for group in batch.groups:
            self._pool.gone([self._seed_of(group.group_id, m) for m in range(len(group.responses))])
        return complete(batch, samples)

    def before_step(self, version: int) -> list[Finished]:
        """The boundary: generation stands still, the learner still holds `version`."""
        begun = time.monotonic()
        num, finished = self._pool.score(self._scorer, version)
        self._metrics |= {"boundary_s": time.monotonic() - begun, "boundary_rows": float(num)}
        return finished

    def after_step(self, batch: Batch, report: StepReport) -> Metrics:
        metrics, self._metrics = self._metrics, {}
        return {**metrics, "proximal_bytes": float(self._pool.num_bytes)}

    def save(self, directory: Path) -> None:
        """Nothing: finished responses carry their scores in the ledger, partial ones do not outlive a kill."""

    def load(self, directory: Path) -> None:
        """See `save`."""
