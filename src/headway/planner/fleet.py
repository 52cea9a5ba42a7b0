"""All simulated engines behind one face: the least loaded one, the oldest version, how many are busy."""

from collections.abc import Callable
from heapq import heappop, heappush

import simpy

from headway.planner.engine import Request, SimulatedEngine
from headway.planner.setup import Setup


class Fleet:
    """Routes requests as the runtime does: a group keeps to one engine, unless it would queue beside a free slot."""

    def __init__(
        self,
        env: simpy.Environment,
        setup: Setup,
        *,
        finish: Callable[[list[Request], SimulatedEngine], None],
        busy_changed: Callable[[], None],
    ) -> None:
        self._finish, self._busy_changed, self._num_slots = finish, busy_changed, setup.num_slots
        self.num_busy = 0
        self._slowdown = 1.0
        self.engines = [
            SimulatedEngine(
                env, i, costs=setup.engine, num_slots=setup.num_slots, finish=self._ended, set_busy=self._count_busy
            )
            for i in range(setup.num_engines)
        ]
        # Lazy: entries whose load is no longer true are skipped, every engine has a true one.
        self._loads = [(0, i) for i in range(setup.num_engines)]
        self._are_together = True
        """Whether all engines hold the same version."""

    @property
    def busy_s(self) -> float:
        """Of all engines since the start."""
        return sum(engine.busy_s for engine in self.engines)

    @property
    def num_tokens(self) -> int:
        """Of finished turns, all engines."""
        return sum(engine.num_tokens for engine in self.engines)

    @property
    def num_steps(self) -> float:
        """Decode steps of all engines."""
        return sum(engine.num_steps for engine in self.engines)

    @property
    def num_refills(self) -> int:
        """Passes in which requests joined, all engines."""
        return sum(engine.num_refills for engine in self.engines)

    def pick(self, admits: Callable[[int], bool]) -> SimulatedEngine | None:
        """The least loaded engine at whose version one more group is admitted; None where there is none."""
        if self._are_together:
            least = self._least_loaded(0)
            return least if admits(least.version) else None
        allowed = {version for version in {engine.version for engine in self.engines} if admits(version)}
        fit = [engine for engine in self.engines if engine.version in allowed]
        return min(fit, key=lambda engine: engine.num_pending, default=None)

    def submit(self, chosen: SimulatedEngine | None, requests: list[Request], *, oldest: int) -> SimulatedEngine:
        """Requests of one group, that no version before `oldest` may sample; returns the group's engine from now on.

        They go to `chosen` (None: the least loaded engine) while it has a free slot, then to the least loaded one while
        that has; when all are full they queue where the last one went.
        """
        engine = chosen or self._least_loaded(oldest)
        while requests:
            num_free = self._num_slots - engine.num_pending
            if num_free <= 0:
                least = self._least_loaded(oldest)
                engine, num_free = (least, 0) if least.num_pending < self._num_slots else (engine, len(requests))
            if num_free:
                engine.submit(requests[:num_free])
                heappush(self._loads, (engine.num_pending, engine.index))
                requests = requests[num_free:]
        return engine

    def load(self, version: int, *, pause_s: float, prefill_again: bool) -> None:
        """All take it at the same moment."""
        for engine in self.engines:
            engine.load(version, pause_s=pause_s, prefill_again=prefill_again)

    def load_one(self, engine: SimulatedEngine, version: int, *, pause_s: float, prefill_again: bool) -> None:
        """One takes it, unless it holds a newer one already."""
        self._are_together = False
        if engine.version < version:
            engine.load(version, pause_s=pause_s, prefill_again=prefill_again)

    def set_slowdown(self, factor: float) -> None:
        """From now on everything takes `factor` times as long."""
        if factor != self._slowdown:
            self._slowdown = factor
            for engine in self.engines:
                engine.set_slowdown(factor)

    def advance(self) -> None:
        for engine in self.engines:
            engine.advance()

    def _least_loaded(self, oldest: int) -> SimulatedEngine:
        """Of those at version `oldest` or newer."""
        while self.engines[self._loads[0][1]].num_pending != self._loads[0][0]:
            heappop(self._loads)
        least = self.engines[self._loads[0][1]]
        if least.version >= oldest:
            return least
        return min((e for e in self.engines if e.version >= oldest), key=lambda engine: engine.num_pending)

    def _ended(self, engine: SimulatedEngine, requests: list[Request]) -> None:
        heappush(self._loads, (engine.num_pending, engine.index))
        self._finish(requests, engine)

    def _count_busy(self, change: int) -> None:
        self.num_busy += change
        self._busy_changed()
