"""Builds the source of π_prox that a run asks for, and what ties it to rollouts and engines."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.config import RunConfig
from headway.ledger import Recovery
from headway.protocols import Engine, Finished, Learner, ProximalSource
from headway.proximal.average_source import AverageSource, window_of
from headway.proximal.messages import WorkerSettings
from headway.proximal.model_source import ModelSource
from headway.proximal.pool import InterruptSource, Pool
from headway.proximal.scorer import Scorer
from headway.proximal.snapshot_source import SnapshotSource
from headway.proximal.snapshots import SnapshotStore
from headway.proximal.source import NoSource
from headway.rollout.group import sample_seed
from headway.runtime.gate import Gate
from headway.runtime.local import EnginePool
from headway.runtime.ranks import RankedLearner
from headway.runtime.run_folder import RunFolder
from headway.runtime.signal import Signal
from headway.runtime.site import HERE, Site
from headway.runtime.worker import WorkerProcess
from headway.training.learner import TorchLearner
from headway.types import Group, Prompt, Response


class Watcher:
    """What rollouts tell a source; most sources need to hear nothing."""

    def engine(self, engine: Engine) -> Engine:
        """The engine that a rollout is to ask."""
        return engine

    def finished(self, group_id: int, member: int, prompt: Prompt, response: Response) -> Response:
        """A response ended; what comes back is stored."""
        return response

    def whole(self, group: Group) -> None:
        """All members ended."""

    def gone(self, group_id: int) -> None:
        """The group was dropped."""

    def restored(self, recovery: Recovery, prompt: Callable[[int], Prompt]) -> None:
        """A resumed run has these responses in flight."""
        for group_id, members in recovery.partial.items():
            for member, response in members.items():
                self.finished(group_id, member, prompt(group_id), response)
        for group_id, responses in recovery.ready.items():
            for member, response in enumerate(responses):
                self.finished(group_id, member, prompt(group_id), response)


class PoolWatcher(Watcher):
    """`exact_interrupt`: every token passes the gate and lands in the pool."""

    def __init__(self, gate: Gate, pool: Pool, *, run_seed: int, group_size: int) -> None:
        self._gate, self._pool = gate, pool
        self._run_seed, self._group_size = run_seed, group_size

    def engine(self, engine: Engine) -> Engine:
        return self._gate.watch(engine)

    def finished(self, group_id: int, member: int, prompt: Prompt, response: Response) -> Response:
        seed = sample_seed(self._run_seed, group_id, member)
        return self._pool.finished(seed, group_id, member, prompt.token_ids, response)

    def gone(self, group_id: int) -> None:
        self._pool.gone([sample_seed(self._run_seed, group_id, member) for member in range(self._group_size)])


class GroupWatcher(Watcher):
    """`exact_model`: a whole group goes to the worker at once."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def whole(self, group: Group) -> None:
        self._source.whole(group)

    def gone(self, group_id: int) -> None:
        self._source.gone(group_id)


@dataclass(frozen=True, slots=True)
class Proximal:
    """A source and its ties."""

    source: ProximalSource
    watcher: Watcher
    gate: Gate | None = None
    """Only `exact_interrupt` stops generation."""

    def save(self, learner: Learner, directory: Path) -> None:
        """Everything a checkpoint holds."""
        learner.save(directory)
        self.source.save(directory)


@dataclass(frozen=True, slots=True)
class Forward:
    """Where and in which precision the learner computes, and so whoever scores in its stead."""

    device: str
    autocast: torch.dtype


def build_proximal(
    config: RunConfig,
    folder: RunFolder,
    learner: TorchLearner | RankedLearner,
    engines: EnginePool,
    forward: Forward,
    site: Site = HERE,
    *,
    signal: Signal,
    say: Callable[[str], None],
    stack: ExitStack,
) -> Proximal:
    """What `config.proximal` names, with the state of the checkpoint the learner stands at."""
    scorer = Scorer(
        learner.model,
        temperature=config.sampling.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        autocast=forward.autocast,
    )
    match config.proximal:
        case "exact_snapshot":
            source = SnapshotSource(
                scorer,
                SnapshotStore(folder.snapshots),
                max_staleness=config.max_staleness,
                parameters=learner.weights,
            )
            return Proximal(source, Watcher())
        case "exact_model":
            source = ModelSource(
                _worker(config, folder, forward, site, say),
                SnapshotStore(folder.snapshots),
                max_staleness=config.max_staleness,
                policy_version=learner.policy_version,
                parameters=learner.weights,
            )
            stack.callback(source.close)
            return Proximal(source, GroupWatcher(source))
        case "exact_interrupt":
            return _interrupting(config, scorer, engines, signal)
        case "ewma":
            return Proximal(build_average(config, folder, learner, scorer), Watcher())
        case _:
            return Proximal(NoSource(), Watcher())


def _worker(
    config: RunConfig, folder: RunFolder, forward: Forward, site: Site, say: Callable[[str], None]
) -> WorkerProcess:
    settings = WorkerSettings(
        model=str(folder.checkpoint(0)),
        snapshots=str(folder.snapshots),
        temperature=config.sampling.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        device=forward.device,
        autocast="bfloat16" if forward.autocast == torch.bfloat16 else "float32",
        num_threads=config.learner.num_threads,
    )
    return WorkerProcess(
        settings,
        log_path=folder.logs / "old-logit-worker.log",
        timeout_s=config.engines.update_timeout_s,
        max_restarts=config.engines.max_restarts,
        say=say,
        spawn=site.spawn,
    )


def _interrupting(config: RunConfig, scorer: Scorer, engines: EnginePool, signal: Signal) -> Proximal:
    pool = Pool()
    gate = Gate(engines, pool, signal)
    source = InterruptSource(scorer, pool, seed_of=lambda group, member: sample_seed(config.seed, group, member))
    return Proximal(source, PoolWatcher(gate, pool, run_seed=config.seed, group_size=config.group_size), gate)


def build_average(
    config: RunConfig, folder: RunFolder, learner: TorchLearner | RankedLearner, scorer: Scorer
) -> AverageSource:
    """Hilton's variant is the revised one with a fixed decay and no reset."""
    original = config.algorithm == "ppo_ewma"
    ewma = config.ewma
    window = "fixed" if original else ewma.window
    source = AverageSource(
        scorer,
        window=window_of(window, max_staleness=config.max_staleness, decay=ewma.decay),
        reset_below=0.0 if original else ewma.reset_below,
        parameters=learner.weights,
    )
    checkpoint = folder.checkpoint(learner.policy_version)
    if checkpoint.is_dir():
        source.load(checkpoint)
    return source


def store_again(finished: Sequence[Finished]) -> dict[tuple[int, int], Response]:
    """By sample, as the ledger takes them."""
    return {(each.group_id, each.member): each.response for each in finished}
