"""The one loop: synchronous training is `max_staleness = 0`, not another path through it.

| task | consumes | produces | waits for | unblocked by |
|---|---|---|---|---|
| `Rollouts.run` | group ids, admission | whole groups | room within the bound | a batch taken, a sync |
| `Loop._train` | whole groups | steps, versions, checkpoints | B groups; the last sync | groups, engines |
| `Loop._sync` | a published version | engines on it; an evaluation when due | engines that keep up | engines, clock |
| `EnginePool.supervise` | exit codes | restarted engines | the clock | the clock |
| `Waits.watch` | waits under way | starvation reports | the clock | the clock |

Order of one step: take groups → proximal pass → record → ledger commits (write-ahead) → learner accumulates the
gradient → boundary → learner steps → publish → sync in flight. The boundary is where a source of π_prox meets the
old parameters for the last time; `exact_interrupt` stops generation there until the new version has arrived.
A recorded batch that a kill left uncommitted is written over, for its groups are still in flight.
At most one version is in flight: the next publish waits until the engines that keep up have the last one; one that
lags skips to the newest as it can, except where all must change together (`update_together`). Shutdown: training ends,
the last sync ends, rollouts are cancelled, supervision is cancelled; the wiring then closes engines, channel, ledger.
An orderly stop ends training after the step in hand and a checkpoint, and does not wait for the last sync.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headway.accounts import audit_file
from headway.engine.conformance import Conformance
from headway.ledger import Ledger
from headway.protocols import Learner, WeightChannel
from headway.runtime.batch import PreparedBatch, batch_metrics, prepare, with_scores
from headway.runtime.evaluation import Evaluation
from headway.runtime.failures import first_error
from headway.runtime.local import EnginePool
from headway.runtime.proximal import Proximal, store_again
from headway.runtime.recording import write_batch
from headway.runtime.rollouts import Rollouts
from headway.runtime.run_folder import RunFolder
from headway.runtime.throughput import Throughput
from headway.runtime.timeline import Timeline
from headway.runtime.waits import Waits
from headway.staleness import OverBound
from headway.types import Batch, Group, Split, WeightRef

T = TypeVar("T")

Record = Mapping[str, Any]
"""One line of metrics.jsonl; `kind` is `step` or `evaluation`."""


class Loop:
    """Takes whole groups, trains, publishes, evaluates and checkpoints until `num_steps` steps are done."""

    def __init__(
        self,
        *,
        rollouts: Rollouts,
        engines: EnginePool,
        learner: Learner,
        proximal: Proximal,
        channel: WeightChannel,
        ledger: Ledger,
        folder: RunFolder,
        waits: Waits,
        timeline: Timeline,
        conformance: Conformance,
        evaluate: Callable[[Split, int, int], Coroutine[Any, Any, Evaluation]],
        log: Callable[[Record], None],
        num_steps: int,
        max_staleness: int,
        over_bound: OverBound,
        update_together: bool,
        evaluate_every: int,
        evaluation_size: int,
        test_size: int,
        checkpoint_every: int,
        keep_checkpoints: int,
        record: bool,
        evaluated: set[tuple[Split, int]],
    ) -> None:
        self._rollouts = rollouts
        self._engines = engines
        self._learner = learner
        self._source, self._gate = proximal.source, proximal.gate
        self._save = partial(proximal.save, learner)
        self._channel = channel
        self._ledger = ledger
        self._folder = folder
        self._waits = waits
        self._timeline = timeline
        self._conformance = conformance
        self._evaluate = evaluate
        self._log = log
        self._num_steps = num_steps
        self._max_staleness = max_staleness
        self._over_bound: OverBound = over_bound
        self._update_together = update_together
        self._evaluate_every = evaluate_every
        self._evaluation_size = evaluation_size
        self._test_size = test_size
        self._checkpoint_every = checkpoint_every
        self._keep_checkpoints = keep_checkpoints
        self._record = record
        self._evaluated = evaluated
        # One thread: the learner's calls never overlap, and the event loop stays free for the engines.
        self._learner_thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._syncing: asyncio.Task[None] | None = None
        self._publish_lag_s = self._boundary_wait_s = 0.0
        self._throughput = Throughput(waits)
        self._next_audit = 0
        self._stepping = False
        self.stopped = False
        """Whether `run` ended early because it was told to."""

    def stop(self) -> bool:
        """Finish the step in hand, save a checkpoint and end; False outside the steps: there is nothing to save."""
        self.stopped = True
        self._rollouts.stop()
        return self._stepping

    async def run(self) -> None:
        """Train to the end, or raise the first error of any task; everything is cancelled on the way out."""
        ref = await self._in_learner_thread("publish", self._publish)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                running = [self._tasks.create_task(self._waits.watch())]
                with self._waits.wait("run", self._engines.describe, "engines.num_threads"):
                    await self._engines.start(ref, self._channel.deliver, self._conformance.check)
                background = (self._engines.supervise(), self._rollouts.run(), self._flush())
                running += [self._tasks.create_task(coroutine) for coroutine in background]
                await self._train()
                for task in [*running, *filter(None, [self._syncing])]:
                    task.cancel()
        except BaseExceptionGroup as failures:
            error = first_error(failures)
            raise error from error.__cause__
        finally:
            self._learner_thread.shutdown()

    async def _train(self) -> None:
        version = self._learner.policy_version
        if version == 0:
            await self._evaluate_once("test", self._test_size, version)
        await self._evaluate_if_due(version)  # a kill may have come between its publish and its evaluation
        self._stepping = True
        while version < self._num_steps and await self._train_one(version):
            version = self._learner.policy_version
            if version % self._checkpoint_every == 0 and version < self._num_steps:
                await self._checkpoint()
        await self._checkpoint()
        self._stepping = False
        if not self.stopped:
            await self._last_sync()
            await self._evaluate_once("test", self._test_size, version)

    async def _train_one(self, version: int) -> bool:
        """One step from whole groups to the next version in flight; False when the run was told to stop instead."""
        with self._waits.wait("learner", self._rollouts.describe, "max_staleness, num_engines or num_slots"):
            groups = await self._rollouts.whole_groups()
        if not groups:
            return False
        prepared = await self._commit(groups, version)
        learned = await self._learn(prepared.batch)
        self._rollouts.tighten(int(learned.get("guard_max_staleness", self._max_staleness)))
        if not self.stopped:  # else nobody will sample with it, and the engines may be gone already
            await self._publish_in_flight(self._learner.policy_version)
        self._log_step(prepared, learned)
        return True

    async def _commit(self, groups: list[Group], version: int) -> PreparedBatch:
        """Enforce the bound, score, record, write ahead: from here on a killed run trains this batch again."""
        prepared = prepare(
            groups,
            step=version,
            policy_version=version,
            max_staleness=self._max_staleness,
            over_bound=self._over_bound,
        )
        batch = await self._in_learner_thread("proximal", lambda: self._source.complete(prepared.batch))
        scored = {} if batch is prepared.batch else with_scores(groups, batch)
        if self._record:
            write_batch(self._folder.batches, batch)
        self._ledger.commit_step(
            version,
            version,
            [group.group_id for group in groups],
            token_staleness=prepared.token_staleness,
            num_masked=prepared.num_masked,
            responses=scored,
        )
        return replace(prepared, batch=batch)

    async def _learn(self, batch: Batch) -> Mapping[str, Any]:
        """One optimizer step, with the boundary between its halves; what learner and source say of it."""
        await self._in_learner_thread("train", lambda: self._learner.accumulate(batch))
        if self._gate is not None:
            begun = time.monotonic()
            await self._last_sync()  # every engine holds exactly this version, and no evaluation runs
            with self._waits.wait("learner", self._engines.describe, "engines.update_timeout_s"):
                await self._rollouts.sampled()  # with an exact lag nothing may be left for the next version
                await self._gate.close()
            self._boundary_wait_s = time.monotonic() - begun
        finished = await self._in_learner_thread("proximal", lambda: self._source.before_step(batch.policy_version))
        self._ledger.store_again(store_again(finished))
        report = await self._in_learner_thread("train", self._learner.step)
        of_source = await self._in_learner_thread("proximal", lambda: self._source.after_step(batch, report))
        return {**report.metrics, **report.profiles, **of_source}

    async def _publish_in_flight(self, version: int) -> None:
        """Write the new version once the last one has arrived everywhere, then let engines swap while we go on."""
        await self._last_sync()
        ref = await self._in_learner_thread("publish", partial(self._publish, self._engines.versions_in_use()))
        self._syncing = self._tasks.create_task(self._sync(ref, version))

    async def _last_sync(self) -> None:
        """Wait until the version in flight has arrived and, where that was due, been evaluated."""
        if self._syncing is not None:
            with self._waits.wait("learner", self._engines.describe, "evaluation.every or evaluation.size"):
                await self._syncing

    async def _sync(self, ref: WeightRef, version: int) -> None:
        await self._rollouts.sampled()
        begun = time.monotonic()
        await self._engines.update(ref, everyone=self._update_together)
        self._publish_lag_s = time.monotonic() - begun
        self._timeline.add("sync", "sync", begun, version=version)
        if self._gate is not None:
            self._gate.open()
            self._timeline.add("gate", "interrupted", time.monotonic() - self._gate.stall_s, version=version)
        await self._evaluate_if_due(version)

    async def _evaluate_if_due(self, version: int) -> None:
        if version and self._evaluate_every and version % self._evaluate_every == 0:
            await self._evaluate_once("validation", self._evaluation_size, version)

    async def _evaluate_once(self, split: Split, size: int, version: int) -> None:
        """Evaluate, unless it is switched off or already on record from before a stop."""
        if not size or (split, version) in self._evaluated:
            return
        with self._waits.wait("evaluation", self._engines.describe, "evaluation.size"):
            evaluation = await self._evaluate(split, size, version)
        facts = {name: getattr(evaluation, name) for name in evaluation.__slots__}
        self._log({"kind": "evaluation", **facts, "elapsed_s": self._throughput.elapsed_s})

    def _publish(self, in_use: Set[int] = frozenset()) -> WeightRef:
        version = self._learner.policy_version
        self._conformance.remember(version)
        return self._channel.publish(version, self._learner.weights(), in_use)

    async def _checkpoint(self) -> None:
        """Save, forget what the checkpoint covers, and prove the ledger if that is due. Raises LedgerError."""
        version = self._learner.policy_version
        await self._in_learner_thread("checkpoint", lambda: self._folder.save_checkpoint(version, self._save))
        self._folder.prune_checkpoints(self._keep_checkpoints)
        # Down to the oldest one kept: should the newest be damaged, the one before continues the run.
        # A run that is stopped in its first step has only version 0, which covers nothing.
        self._ledger.prune(min((v for v in self._folder.checkpoint_versions() if v), default=0) - 1)
        # A proof reads the whole history. When that has grown by a tenth it is due again: so all proofs together cost
        # a constant for each sample, however long the run.
        if version >= self._next_audit:
            self._next_audit = version + version // 10
            audit = await asyncio.to_thread(audit_file, self._folder.ledger_path, max_staleness=self._max_staleness)
            audit.require()

    def _log_step(self, prepared: PreparedBatch, learned: Mapping[str, Any]) -> None:
        statuses = self._engines.statuses()
        self._timeline.engines(statuses)
        self._log(
            {
                "kind": "step",
                "step": prepared.batch.step,
                "policy_version": prepared.batch.policy_version,
                **batch_metrics(prepared),
                **learned,
                **self._throughput.since_last(statuses, len(prepared.batch.responses)),
                **self._rollouts.metrics(),
                **self._engines.metrics(),
                "num_restarts": self._engines.num_restarts,
                "publish_lag_s": self._publish_lag_s,
                **self._stalls(),
                "conformance_delta": self._conformance.last_delta,
                "token_staleness": {str(age): n for age, n in sorted(prepared.token_staleness.items())},
            }
        )

    def _stalls(self) -> dict[str, float]:
        """Of this step's boundary, where there are any; the stall is that of the last one that is over."""
        if self._gate is None:
            return {}
        waits = {"boundary_wait_s": self._boundary_wait_s, "interrupt_s": self._gate.interrupt_s}
        return waits | {"generation_stall_s": self._gate.stall_s}

    async def _flush(self) -> None:
        """Let no event wait long for its commit when nothing else happens. Waits for: the clock."""
        while True:
            await asyncio.sleep(0.5)
            self._ledger.flush()

    async def _in_learner_thread(self, what: str, call: Callable[[], T]) -> T:
        """The call's result; `what` names its span in the timeline."""
        with self._timeline.span("learner", what):
            return await asyncio.get_running_loop().run_in_executor(self._learner_thread, call)
