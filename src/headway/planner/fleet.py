"""All simulated engines behind one face: the least loaded one, the oldest version, how many are busy."""

from collections.abc import Callable
from heapq import heappop, heappush

import simpy

from headway.planner.engine import Request, SimulatedEngine
from headway.planner.setup import Setup


class Fleet:
    """Routes groups as the runtime's pool does: least loaded first, then by seat; all members to one engine."""

    def __init__(
        self,
        env: simpy.Environment,
        setup: Setup,
        *,
        finish: Callable[[list[Request], SimulatedEngine], None],
        busy_changed: Callable[[], None],
    ) -> None:
        self._finish, self._busy_changed = finish, busy_changed
        self.num_busy = 0
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

    def pick(self, admits: Callable[[int], bool]) -> SimulatedEngine | None:
        """The least loaded engine at whose version one more group is admitted; None where there is none."""
        if self._are_together:
            least = self._least_loaded()
            return least if admits(least.version) else None
        allowed = {version for version in {engine.version for engine in self.engines} if admits(version)}
        fit = [engine for engine in self.engines if engine.version in allowed]
        return min(fit, key=lambda engine: engine.num_pending, default=None)

    def submit(self, engine: SimulatedEngine, requests: list[Request]) -> None:
        engine.submit(requests)
        heappush(self._loads, (engine.num_pending, engine.index))

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
        for engine in self.engines:
            engine.set_slowdown(factor)

    def advance(self) -> None:
        for engine in self.engines:
            engine.advance()

    def _least_loaded(self) -> SimulatedEngine:
        while True:
            load, index = self._loads[0]
            if self.engines[index].num_pending == load:
                return self.engines[index]
            heappop(self._loads)

    def _ended(self, engine: SimulatedEngine, requests: list[Request]) -> None:
        heappush(self._loads, (engine.num_pending, engine.index))
        self._finish(requests, engine)

    def _count_busy(self, change: int) -> None:
        before = self.num_busy
        self.num_busy += change
        if not before or not self.num_busy:
            self._busy_changed()
