"""`exact_model`: a worker of its own holds old parameters and scores groups while the learner trains."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from torch import Tensor

from headway.protocols import Finished
from headway.proximal.samples import Sample, complete, samples_of, unscored_versions
from headway.proximal.scorer import Piece
from headway.proximal.snapshots import SnapshotStore
from headway.proximal.source import Metrics
from headway.types import Batch, Floats, Group, StepReport

MOST_GROUPS = 16
"""In one request: enough to fill a forward pass, few enough to answer soon."""


_Job = tuple[Group, Future[list[Sample]]]


class WorkerClient(Protocol):
    """Whoever asks the worker; blocking, used by one thread."""

    def score(self, version: int, pieces: Sequence[Piece]) -> tuple[list[Floats] | None, float]:
        """Log-probs of each piece and the seconds computed; None when the version is no longer kept."""
        ...

    def close(self) -> None: ...


class ModelSource:
    """Hands groups to the worker as soon as they are whole, and waits for what is missing when a batch needs it.

    | thread | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `_serve` | whole groups | their scores | a group; the worker | `whole`, `close`; its reply, death or time-out |

    Shutdown: `close` ends the thread, then the client.
    """

    def __init__(
        self,
        client: WorkerClient,
        store: SnapshotStore,
        *,
        max_staleness: int,
        policy_version: int,
        parameters: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._client, self._store = client, store
        self._max_staleness = max_staleness
        self._parameters = parameters
        store.keep(policy_version, parameters())
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._samples: dict[int, Future[list[Sample]]] = {}
        self._seconds: dict[int, float] = {}
        self._metrics: dict[str, float] = {}
        self._thread = Thread(target=self._serve, name="old-logits", daemon=True)
        self._thread.start()

    def whole(self, group: Group) -> None:
        """A group may be scored: every version in it is published, so its parameters are kept."""
        future: Future[list[Sample]] = Future()
        self._samples[group.group_id] = future
        self._queue.put((group, future))

    def gone(self, group_id: int) -> None:
        """A group was dropped."""
        if (future := self._samples.pop(group_id, None)) is not None:
            future.cancel()

    def complete(self, batch: Batch) -> Batch:
        """Raises MissingLogprobs, and what the worker's client raises."""
        begun = time.monotonic()
        for group in batch.groups:
            if group.group_id not in self._samples:
                self.whole(group)
        scored = [self._samples.pop(group.group_id).result() for group in batch.groups]
        samples = [sample for samples in scored for sample in samples]
        waited = time.monotonic() - begun
        computed = sum(self._seconds.pop(group.group_id, 0.0) for group in batch.groups)
        self._metrics = {
            "proximal_s": waited,
            "proximal_worker_s": computed,
            "proximal_overlap": max(0.0, 1 - waited / computed) if computed else 0.0,
            "proximal_shards": float(len({int(v) for s in samples for v in s.versions if v >= 0})),
        }
        return complete(batch, samples)

    def before_step(self, version: int) -> list[Finished]:
        return []

    def after_step(self, batch: Batch, report: StepReport) -> Metrics:
        """Keep the new parameters before anyone samples with them."""
        begun = time.monotonic()
        version = report.policy_version + 1
        self._store.keep(version, self._parameters())
        self._store.forget_before(version - self._max_staleness)
        metrics, self._metrics = self._metrics, {}
        return {
            **metrics,
            "proximal_keep_s": time.monotonic() - begun,
            "proximal_bytes": float(self._store.num_bytes),
        }

    def save(self, directory: Path) -> None:
        """Nothing: the store's files outlive the process by themselves."""

    def load(self, directory: Path) -> None:
        """See `save`."""

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._client.close()

    def _serve(self) -> None:
        while (first := self._queue.get()) is not None:
            jobs = [(g, f) for g, f in (first, *self._more()) if f.set_running_or_notify_cancel()]
            try:
                scored = self._score([group for group, _ in jobs])
            except Exception as error:  # it belongs to whoever waits for these groups
                for _, future in jobs:
                    future.set_exception(error)
                continue
            for (_, future), samples in zip(jobs, scored, strict=True):
                future.set_result(samples)

    def _more(self) -> "list[_Job]":
        jobs: list[_Job] = []
        while len(jobs) < MOST_GROUPS - 1:
            try:
                job = self._queue.get_nowait()
            except Empty:
                break
            if job is None:
                self._queue.put(None)
                break
            jobs.append(job)
        return jobs

    def _score(self, groups: Sequence[Group]) -> list[list[Sample]]:
        scored = [samples_of([group]) for group in groups]
        everything = [sample for samples in scored for sample in samples]
        seconds = 0.0
        for version in unscored_versions(everything):
            waiting = [(s, piece) for s in everything if (piece := s.unscored(version)) is not None]
            found, computed = self._client.score(version, [piece for _, piece in waiting])
            seconds += computed
            # A version that is gone was over the bound: its tokens are hidden, or the batch will say what it lacks.
            for (sample, piece), logprobs in zip(waiting, found or [], strict=found is not None):
                sample.fill(piece, logprobs)
        for group in groups:
            self._seconds[group.group_id] = seconds / len(groups)
        return scored
