"""What every source shares, and the sources that need no pass of their own."""

from collections.abc import Mapping
from pathlib import Path

from headway.protocols import Finished
from headway.types import Batch, StepReport

Metrics = Mapping[str, float]


class NoSource:
    """`train_start`, `loglinear`, `behavior`: the learner has all they need when it takes its own log-probs."""

    def complete(self, batch: Batch) -> Batch:
        return batch

    def before_step(self, version: int) -> list[Finished]:
        return []

    def after_step(self, batch: Batch, report: StepReport) -> Metrics:
        return {}

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
