"""Engine processes on this machine: started, supervised, restarted, and seen by the loop as one pool."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from headway.engine.messages import EngineSettings
from headway.engine.process import EngineProcess, start_engine
from headway.errors import HeadwayError
from headway.protocols import Engine, EngineDied
from headway.runtime.signal import Signal
from headway.types import EngineStatus, WeightRef


class EngineLost(HeadwayError, RuntimeError):
    """An engine kept dying; the message holds the end of its log."""


@dataclass(slots=True)
class Seat:
    """One place for an engine; processes come and go."""

    name: str
    settings: EngineSettings
    log_path: Path
    process: EngineProcess | None = None
    version: int = -1
    """The oldest version that its next token may carry; −1 while it has no weights."""
    deaths: tuple[float, ...] = ()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.version >= 0


class EnginePool:
    """Several engines behind one face: routing by load with group affinity, updates, supervision.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `supervise` | exit codes | a new process on the current weights; EngineDied for its requests | ticks | the clock |

    Shutdown order: cancel `supervise`, then `close` (SIGTERM, then SIGKILL after a grace time).
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        num_engines: int,
        logs: Path,
        signal: Signal,
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._seats = [Seat(f"engine-{i}", settings, logs / f"engine-{i}.log") for i in range(num_engines)]
        self._signal = signal
        self._max_restarts = max_restarts
        self._say = say
        self._ref: WeightRef | None = None
        self.num_restarts = 0

    async def start(self, ref: WeightRef) -> None:
        """Start all processes and give them their first weights."""
        self._ref = ref
        await asyncio.gather(*(self._fill(seat) for seat in self._seats))

    @property
    def oldest_version(self) -> int | None:
        """The oldest version any living engine may still sample with; None while all are down."""
        return min((seat.version for seat in self._seats if seat.alive), default=None)

    def affine(self) -> Callable[[], Awaitable[Engine]]:
        """A picker for one group: the least loaded engine, the same one for all members while it lives."""
        chosen: Seat | None = None

        async def pick() -> Engine:
            nonlocal chosen
            if chosen is None or not chosen.alive:
                chosen = await self._signal.until(self._least_loaded)
            assert chosen.process is not None
            return chosen.process.client

        return pick

    async def update(self, ref: WeightRef, *, interrupt: bool = False) -> None:
        """Give all engines a new version; one that dies meanwhile gets it when restarted. Raises WeightsRefused."""
        self._ref = ref
        await asyncio.gather(*(self._update(seat, ref, interrupt) for seat in self._seats if seat.alive))
        # Do not let the channel reuse the previous buffer while a restarted engine may be reading it.
        await self._signal.until(lambda: all(seat.version == ref.version for seat in self._seats))

    def statuses(self) -> list[EngineStatus]:
        """What the living engines last said of themselves; it comes with every reply."""
        clients = [seat.process.client for seat in self._seats if seat.process is not None and seat.alive]
        return [client.last_status for client in clients if client.last_status is not None]

    async def supervise(self) -> None:
        """Replace processes that died. Raises EngineLost when one keeps dying."""
        while True:
            await asyncio.sleep(0.1)
            for seat in self._seats:
                if seat.process is not None and seat.process.poll() is not None:
                    await self._replace(seat, seat.process)

    async def close(self) -> None:
        processes = [seat.process for seat in self._seats if seat.process is not None]
        for seat in self._seats:
            seat.process, seat.version = None, -1
        await asyncio.gather(*(_stop(process) for process in processes))

    async def _replace(self, seat: Seat, dead: EngineProcess) -> None:
        code, log_tail = dead.poll(), dead.log_tail()
        seat.process, seat.version = None, -1
        now = monotonic()
        seat.deaths = (*(t for t in seat.deaths if now - t < 60), now)
        if len(seat.deaths) > self._max_restarts:
            raise EngineLost(
                f"{seat.name} died {len(seat.deaths)} times within a minute (exit {code}); its log ends:\n{log_tail}"
            )
        self._say(f"{seat.name} died (exit {code}); restarting it and asking again for what it was generating")
        self.num_restarts += 1
        dead.client.fail_all(EngineDied(f"{seat.name} died (exit {code})"))
        await _stop(dead)
        await self._fill(seat)

    async def _fill(self, seat: Seat) -> None:
        """Start a process in this seat and bring it to the current version, which may move meanwhile."""
        process = await asyncio.to_thread(start_engine, seat.settings, log_path=seat.log_path, name=seat.name)
        seat.process = process
        while self._ref is not None and seat.version != self._ref.version and process.poll() is None:
            await self._update(seat, self._ref, interrupt=False)

    async def _update(self, seat: Seat, ref: WeightRef, interrupt: bool) -> None:
        """Move one engine to `ref`. A dead one is left to the supervisor, and so is one that does not answer."""
        process = seat.process
        if process is None:
            return
        try:
            # Sent back to back: what was interrupted must not come back before the new weights are in.
            interrupted = [process.client.interrupt()] if interrupt else []
            await asyncio.gather(*interrupted, process.client.update_weights(ref))
        except EngineDied:
            return
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.process.kill()
            return
        seat.version = ref.version
        self._signal.notify()

    def _least_loaded(self) -> Seat | None:
        alive = [seat for seat in self._seats if seat.alive]
        return min(alive, key=lambda seat: seat.process.client.num_pending if seat.process else 0, default=None)


async def _stop(process: EngineProcess) -> None:
    process.client.close()  # in the event loop's thread, which owns the socket
    await asyncio.to_thread(process.stop)
