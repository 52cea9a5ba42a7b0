"""Training again from recorded batches, with no engine and no environment."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.models.loading import load_causal_lm, named_weights
from headway.protocols import Learner
from headway.runtime.recording import BundleError, read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder, RunFolderError


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found: every checkpoint of the run that it passed, compared bit by bit.

    Example: `Replayed(num_steps=100, compared=(50, 100), differing={})`
    """

    num_steps: int
    compared: tuple[int, ...]
    """Versions whose checkpoint was compared."""
    differing: dict[int, list[str]]
    """Version to names of parameters that are not bit-identical."""

    @property
    def exact(self) -> bool:
        return bool(self.compared) and not self.differing


def replay(
    folder: RunFolder, learner: Learner, *, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> Replayed:
    """Train all recorded batches in order, from version 0, and compare with each checkpoint on the way.

    Raises BundleError when a batch is missing or damaged, RunFolderError when nothing was recorded.
    """
    steps = list(recorded_steps(folder.batches))
    if not steps:
        raise RunFolderError(f"{folder.path} holds no recorded batches; set record = true before the run")
    if steps != list(range(len(steps))):
        missing = sorted(set(range(steps[-1] + 1)) - set(steps))
        raise BundleError(f"{folder.batches} lacks the batches of steps {missing[:8]}")
    checkpoints = set(folder.checkpoint_versions()) - {0}
    compared: list[int] = []
    differing: dict[int, list[str]] = {}
    for step in steps:
        report = learner.train(read_batch(folder.batches, step))
        on_step(step, report.metrics["loss"])
        if learner.policy_version in checkpoints:
            compared.append(learner.policy_version)
            names = _differences(folder, learner)
            if names:
                differing[learner.policy_version] = names
    return Replayed(len(steps), tuple(compared), differing)


def _differences(folder: RunFolder, learner: Learner) -> list[str]:
    """Names of parameters whose bits differ from the checkpoint of the learner's version."""
    directory = folder.checkpoint(learner.policy_version)
    # As a model, not as a file: a checkpoint holds each expert under a name of its own, a model all of them in one.
    saved = named_weights(load_causal_lm(directory))
    return [
        name
        for name, tensor in learner.weights().items()
        if name not in saved or not torch.equal(saved[name], tensor.detach().cpu())
    ]
