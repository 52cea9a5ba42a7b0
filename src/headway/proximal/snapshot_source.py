"""`exact_snapshot`: every token under the kept parameters of the version that sampled it."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from headway.protocols import Finished
from headway.proximal.samples import complete, fill, samples_of, unscored_versions
from headway.proximal.scorer import Scorer
from headway.proximal.snapshots import SnapshotStore
from headway.proximal.source import Metrics
from headway.types import Batch, StepReport


class SnapshotSource:
    """One forward pass for each version in the batch, over the prefixes up to its last token.

    The current version is the learner's own parameters, so `max_staleness` older ones are kept.
    """

    def __init__(
        self,
        scorer: Scorer,
        store: SnapshotStore,
        *,
        max_staleness: int,
        parameters: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._scorer, self._store = scorer, store
        self._max_staleness = max_staleness
        self._parameters = parameters
        self._metrics: dict[str, float] = {}

    def complete(self, batch: Batch) -> Batch:
        """Raises SnapshotGone, MissingLogprobs."""
        begun = time.monotonic()
        samples = samples_of(batch.groups)
        versions = unscored_versions(samples)
        read_s, num_rows = 0.0, 0
        for version in versions:
            before = time.monotonic()
            parameters = None if version == batch.policy_version else self._store.read(version)
            read_s += time.monotonic() - before
            num_rows += fill(samples, self._scorer, parameters, version)
        self._metrics = {
            "proximal_s": time.monotonic() - begun,
            "proximal_read_s": read_s,
            "proximal_shards": float(len(versions)),
            "proximal_rows": float(num_rows),
        }
        return complete(batch, samples)

    def before_step(self, version: int) -> list[Finished]:
        """Keep these parameters: they are about to change, and tokens in flight carry their version."""
        begun = time.monotonic()
        if self._max_staleness:
            self._store.keep(version, self._parameters())
            self._store.forget_before(version + 1 - self._max_staleness)
        self._metrics["proximal_keep_s"] = time.monotonic() - begun
        return []

    def after_step(self, batch: Batch, report: StepReport) -> Metrics:
        metrics, self._metrics = self._metrics, {}
        return {**metrics, "proximal_bytes": float(self._store.num_bytes)}

    def save(self, directory: Path) -> None:
        """Nothing: the store's files outlive the process by themselves."""

    def load(self, directory: Path) -> None:
        """See `save`."""
