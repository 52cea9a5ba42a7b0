"""The generating side: issues groups within the staleness bound, runs them, and keeps the whole ones."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.errors import HeadwayError
from headway.ledger import Ledger, Recovery
from headway.protocols import Engine, Environment, RequestRefused
from headway.rollout.episode import EnvironmentFailed
from headway.rollout.group import EpisodeFailed, run_group
from headway.rollout.order import prompt_index
from headway.runtime.failures import first_error
from headway.runtime.local import EnginePool
from headway.runtime.proximal import Watcher
from headway.runtime.scoring import TeacherStage
from headway.runtime.signal import Signal
from headway.runtime.waits import Waits
from headway.staleness import Admission
from headway.types import Group, Prompt, Response, Sampling


class RolloutsFailing(HeadwayError, RuntimeError):
    """So many groups failed in a row that going on would only burn prompts."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """How one prompt is played, in training and in evaluation."""

    sampling: Sampling
    group_size: int
    run_seed: int
    max_response_tokens: int
    max_turns: int
    attempts: int
    episode_timeout_s: float


class Rollouts:
    """Issues groups in the order of their ids and keeps the whole ones until the learner takes them.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `run` | group ids, admission | generating groups | room in the bound | a batch taken, a sync, a restart |
    | one a group | tokens, rewards, scores | a whole group, or a drop and why | episodes | engine, teacher, clock |
    | `Teacher.run` | exit codes, silence | a teacher that answers | the clock | the clock |

    Shutdown: cancelling `run` cancels the groups, which cancel their requests; what they had stays in flight in the
    ledger, and `resume` continues it.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        engines: EnginePool,
        ledger: Ledger,
        admission: Admission,
        signal: Signal,
        waits: Waits,
        settings: EpisodeSettings,
        decode: Callable[[Sequence[int]], str],
        total_groups: int,
        watcher: Watcher,
        teacher_stage: TeacherStage | None = None,
    ) -> None:
        self._environment = environment
        self._engines = engines
        self._ledger = ledger
        self._admission = admission
        self._signal = signal
        self._waits = waits
        self._settings = settings
        self._decode = decode
        self._total_groups = total_groups
        self._watcher = watcher
        self._stage = teacher_stage
        self._next_group_id = 0
        self._num_taken = 0
        self._failures_in_a_row = 0
        self._stopping = False
        self._whole: dict[int, Group] = {}
        self._partial: dict[int, tuple[int, Mapping[int, Response]]] = {}
        self._num_started = self._num_finished = 0
        """Responses since the last call of `metrics`."""
        self.next_version = 0
        """The version that the next batch will train."""

    def restore(self, recovery: Recovery, *, num_taken: int, policy_version: int) -> None:
        """Take up what a stopped run had in flight: whole groups wait again, the others generate the rest."""
        self._next_group_id = recovery.next_group_id
        self._num_taken = num_taken
        self.next_version = policy_version
        for group_id, responses in recovery.ready.items():
            group = Group(group_id, self.prompt(group_id), responses)
            self._admission.issue(group_id, engine_version=group.oldest_version)
            self._admission.ready(group_id, oldest_version=group.oldest_version)
            self._whole[group_id] = group
        for group_id, finished in recovery.partial.items():
            oldest = min((r.oldest_version for r in finished.values()), default=policy_version)
            self._admission.issue(group_id, engine_version=oldest)
            self._partial[group_id] = oldest, finished

    def prompt(self, group_id: int) -> Prompt:
        """Pure: the group id is the cursor of the prompt source."""
        _, index = prompt_index(group_id, self._environment.size("train"), self._settings.run_seed)
        return self._environment.prompt("train", index)

    async def run(self) -> None:
        """Issue groups until the run's demand is met. Raises RolloutsFailing, and what an engine does wrong."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._stage is not None:
                    tasks.create_task(self._stage.teacher.run())
                for group_id, (oldest, finished) in self._partial.items():
                    tasks.create_task(self._roll_out(group_id, oldest, finished))
                while True:
                    version = await self._signal.until(self._room)
                    tasks.create_task(self._roll_out(self._issue(version), version, {}))
                    # One turn of the event loop each, so that a long queue never holds the others up.
                    await asyncio.sleep(0)
        except BaseExceptionGroup as failures:
            error = first_error(failures)
            raise error from error.__cause__

    async def whole_groups(self) -> list[Group]:
        """The groups of the next batch, sorted by id, as soon as the bound lets them train; none once stopped."""
        return await self._signal.until(self._take)

    def stop(self) -> None:
        """Give out no further batch. Groups are issued still: the step in hand may need them for its sync to end."""
        self._stopping = True
        self._signal.notify()

    def _take(self) -> list[Group] | None:
        if self._stopping:
            return []
        for group_id in self._admission.expired(self.next_version):
            self._admission.remove(group_id)
            del self._whole[group_id]
            self._watcher.gone(group_id)
            self._ledger.drop(group_id, f"older than max_staleness = {self._admission.max_staleness}")
            self._signal.notify()
        chosen = self._admission.next_batch(self.next_version)
        if chosen is None:
            return None
        self._num_taken += len(chosen)
        self.next_version += 1
        self._signal.notify()
        return [self._whole.pop(group_id) for group_id in chosen]

    def tighten(self, max_staleness: int) -> None:
        """Issue from now on for a bound no larger than this one."""
        self._admission.tighten(min(max_staleness, self._admission.max_staleness))

    @property
    def num_generating(self) -> int:
        return self._admission.num_generating

    @property
    def num_ready(self) -> int:
        return self._admission.num_ready

    def describe(self) -> str:
        """What a waiting learner is told."""
        pressing = self._admission.pressing(self.next_version)
        scoring = f"; {self._stage.describe()}" if self._stage is not None else ""
        return (
            f"whole groups ({self.num_ready} of {self._admission.groups_per_step} ready, {self.num_generating} "
            f"generating, pressing: {', '.join(map(str, pressing[:8])) or 'none'}{scoring})"
        )

    def metrics(self) -> dict[str, float]:
        """What is in flight, what started and ended since the last call, and how the teacher does."""
        counts = {
            "num_generating": self.num_generating,
            "num_ready": self.num_ready,
            "num_started": self._num_started,
            "num_finished": self._num_finished,
        }
        self._num_started = self._num_finished = 0
        return counts | (self._stage.metrics() if self._stage is not None else {})

    async def sampled(self) -> None:
        """Return when engines may take new weights: at once, but for a run with an exact lag."""
        await self._signal.until(self._is_sampled)

    def _is_sampled(self) -> bool:
        version = self._engines.oldest_version
        return version is not None and self._admission.is_sampled(version, demand_met=self._demand_met())

    def _demand_met(self) -> bool:
        return self._num_taken + self._admission.num_pending >= self._total_groups

    def _room(self) -> int | None:
        """The version to issue at, if demand, bound and engines allow one more group."""
        if self._demand_met():
            return None
        return self._engines.version_for(
            lambda version: self._admission.may_issue(policy_version=self.next_version, engine_version=version)
        )

    def _issue(self, engine_version: int) -> int:
        group_id = self._next_group_id
        self._next_group_id += 1
        self._ledger.issue(group_id, engine_version)
        self._admission.issue(group_id, engine_version=engine_version)
        return group_id

    async def _roll_out(self, group_id: int, oldest: int, finished: Mapping[int, Response]) -> None:
        """Generate a group that was issued at version `oldest`: no engine may sample for it with an older one."""
        settings = self._settings
        self._num_started += settings.group_size - len(finished)

        def finish(member: int, response: Response) -> None:
            self._num_finished += 1
            self._ledger.finish(group_id, member, self._watcher.finished(group_id, member, prompt, response))

        try:
            prompt = self._ask_for_prompt(group_id)
            group = await run_group(
                group_id,
                prompt,
                environment=self._environment,
                pick_engine=self._picker(oldest),
                sampling=settings.sampling,
                group_size=settings.group_size,
                run_seed=settings.run_seed,
                decode=self._decode,
                max_response_tokens=settings.max_response_tokens,
                max_turns=settings.max_turns,
                attempts=settings.attempts,
                episode_timeout_s=settings.episode_timeout_s,
                score=self._stage.score if self._stage is not None else None,
                finished=finished,
                on_finish=finish,
                on_discard=lambda member, n: self._ledger.discard(group_id, member, n, "attempt lost"),
            )
        except (EpisodeFailed, EnvironmentFailed, RequestRefused) as error:
            self._give_up(group_id, error)
            return
        self._failures_in_a_row = 0
        self._whole[group_id] = group
        self._watcher.whole(group)
        self._admission.ready(group_id, oldest_version=group.oldest_version)
        self._signal.notify()

    def _picker(self, oldest: int) -> Callable[[], Awaitable[Engine]]:
        """One engine for all members of a group, as the watcher wants it seen."""
        affine = self._engines.affine(oldest)

        async def pick() -> Engine:
            return self._watcher.engine(await affine())

        return pick

    def _ask_for_prompt(self, group_id: int) -> Prompt:
        try:
            return self.prompt(group_id)
        except Exception as error:
            raise EnvironmentFailed(f"group {group_id}: its prompt raised {type(error).__name__}: {error}") from error

    def _give_up(self, group_id: int, error: Exception) -> None:
        self._watcher.gone(group_id)
        self._ledger.drop(group_id, str(error))
        self._admission.remove(group_id)
        self._signal.notify()
        self._failures_in_a_row += 1
        if self._failures_in_a_row > 2 * self._admission.groups_per_step + 8:
            raise RolloutsFailing(
                f"{self._failures_in_a_row} groups failed in a row, so nothing would ever train; the last one: {error}"
            ) from error
