"""`exact_interrupt`: generation stands still between the end of one version and the start of the next."""

import time
from dataclasses import dataclass

from headway.protocols import Engine
from headway.proximal.pool import Pool
from headway.runtime.local import EnginePool
from headway.runtime.signal import Signal
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Sampling, WeightRef


class Gate:
    """Lets requests of rollouts through while it is open, and keeps what they bring back in the pool.

    `close` waits for: all requests under way. Unblocked by: the interruption, or an engine's death.
    """

    def __init__(self, engines: EnginePool, pool: Pool, signal: Signal) -> None:
        self._engines, self._pool, self._signal = engines, pool, signal
        self._closed_at: float | None = None
        self._num_running = 0
        self.interrupt_s = 0.0
        """Seconds from the last closing until no request ran."""
        self.stall_s = 0.0
        """Seconds the gate was closed last."""

    @property
    def is_open(self) -> bool:
        return self._closed_at is None

    def watch(self, engine: Engine) -> Engine:
        """The same engine, behind this gate."""
        return _Watched(engine, self)

    async def close(self) -> None:
        """Returns when no token is made any more and every token made is in the pool."""
        self._closed_at = time.monotonic()
        await self._engines.interrupt()
        await self._signal.until(lambda: not self._num_running)
        self.interrupt_s = time.monotonic() - self._closed_at

    def open(self) -> None:
        """Generation goes on."""
        if self._closed_at is not None:
            self.stall_s = time.monotonic() - self._closed_at
            self._closed_at = None
            self._signal.notify()

    async def generate(self, engine: Engine, token_ids: Ints, sampling: Sampling) -> Completion:
        """Wait for the open gate, then ask; no suspension lies between the two."""
        await self._signal.until(lambda: self.is_open)
        self._num_running += 1
        try:
            completion = await engine.generate(token_ids, sampling)
            self._pool.sampled(sampling.seed, token_ids, completion)
            return completion
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._signal.notify()


@dataclass(frozen=True, slots=True)
class _Watched:
    """An engine whose requests pass the gate."""

    engine: Engine
    gate: Gate

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        return await self.gate.generate(self.engine, token_ids, sampling)

    async def update_weights(self, ref: WeightRef) -> None:
        await self.engine.update_weights(ref)

    async def interrupt(self) -> None:
        await self.engine.interrupt()

    async def status(self) -> EngineStatus:
        return await self.engine.status()

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        return self.engine.origin(sampling)
