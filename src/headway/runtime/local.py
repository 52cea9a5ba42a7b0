"""Engine processes on this machine: started, supervised, restarted, and seen by the loop as one pool."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.engine.hosting import Client, Host, Launch
from headway.errors import HeadwayError
from headway.protocols import Engine, EngineDied
from headway.runtime.signal import Signal
from headway.types import EngineStatus, WeightRef

_TICK_S = 0.1
"""How often a process is looked at."""

_PING_S = 5.0
"""How often an engine is asked whether it still answers."""


Deliver = Callable[[WeightRef, Engine], Awaitable[int]]


async def hand_over(ref: WeightRef, engine: Engine) -> int:
    """Have the engine read a file."""
    await engine.update_weights(ref)
    return ref.version


class EngineLost(HeadwayError, RuntimeError):
    """An engine kept dying; the message holds the end of its log."""


@dataclass(slots=True)
class Seat:
    """One place for an engine; processes come and go."""

    name: str
    log_path: Path
    process: Host | None = None
    version: int = -1
    """The oldest version that its next token may carry; −1 while it has no weights."""
    num_failures: int = 0
    """Deaths and failed starts since it last took a new version."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.version >= 0

    @property
    def num_pending(self) -> int:
        return self.process.client.num_pending if self.process is not None else 0


class EnginePool:
    """Several engines behind one face: routing by load with group affinity, updates, supervision.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `supervise` | exit codes | a new process on the newest weights; EngineDied for its calls | ticks | the clock |

    Shutdown order: cancel `supervise`, then `close` (SIGTERM, then SIGKILL after a grace time).
    """

    def __init__(
        self,
        launch: Launch,
        *,
        num_engines: int,
        logs: Path,
        signal: Signal,
        max_restarts: int,
        update_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._seats = [Seat(f"engine-{i}", logs / f"engine-{i}.log") for i in range(num_engines)]
        self._launch_host = launch
        self._signal = signal
        self._max_restarts = max_restarts
        self._update_timeout_s = update_timeout_s
        self._say = say
        self._ref: WeightRef | None = None
        self._deliver: Deliver = hand_over
        self.num_restarts = 0

    async def start(self, ref: WeightRef, deliver: Deliver = hand_over) -> None:
        """Start all processes and give them their first weights. Raises EngineLost when one does not get there.

        `deliver(ref, engine)` brings one engine to a version, and says which it then holds.
        """
        self._deliver = deliver
        self._ref = ref
        await asyncio.gather(*(self._launch(seat) for seat in self._seats))
        await asyncio.gather(*(self._catch_up(seat) for seat in self._seats))
        for seat in self._seats:
            if seat.process is not None and not seat.alive:
                raise EngineLost(
                    f"{seat.name} ended (exit {seat.process.poll()}) before it had its first weights; its log ends:\n"
                    f"{seat.process.log_tail()}"
                )

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
        for seat in self._seats:
            seat.num_failures = 0 if seat.version == ref.version else seat.num_failures
        # Do not let the channel reuse the previous buffer while a restarted engine may be reading it.
        await self._signal.until(lambda: all(seat.version == ref.version for seat in self._seats))

    async def interrupt(self) -> None:
        """Make every unfinished request of every living engine return what it has."""
        await asyncio.gather(*(self._interrupt(seat.process) for seat in self._seats if seat.alive))

    def describe(self) -> str:
        """Every engine and where it stands, for whoever waits for one."""
        wanted = self._ref.version if self._ref else 0
        states = (
            f"{seat.name} {f'at version {seat.version}' if seat.alive else 'down'}, {seat.num_pending} calls pending"
            for seat in self._seats
        )
        return f"engines to hold version {wanted} ({'; '.join(states)})"

    def statuses(self) -> list[EngineStatus]:
        """What the living engines last said of themselves; it comes with every reply."""
        clients = [seat.process.client for seat in self._seats if seat.process is not None and seat.alive]
        return [client.last_status for client in clients if client.last_status is not None]

    def each(self) -> dict[str, Client]:
        """The living engines by name."""
        return {seat.name: seat.process.client for seat in self._seats if seat.process is not None and seat.alive}

    async def supervise(self) -> None:
        """Replace processes that died. Raises EngineLost when one keeps dying."""
        async with asyncio.TaskGroup() as tasks:
            for seat in self._seats:
                tasks.create_task(self._keep_alive(seat))

    async def close(self) -> None:
        processes = [seat.process for seat in self._seats if seat.process is not None]
        for seat in self._seats:
            seat.process, seat.version = None, -1
        await asyncio.gather(*(_stop(process) for process in processes))

    async def _keep_alive(self, seat: Seat) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if seat.process is None:
                await self._relaunch(seat)
            elif seat.process.poll() is not None:
                await self._bury(seat, seat.process)
            elif seat.alive:
                await self._ping(seat.process)

    async def _ping(self, process: Host) -> None:
        """A process that lives but does not answer is as good as dead."""
        try:
            await _while_alive(process, asyncio.ensure_future(process.client.status()))
            await _while_alive(process, asyncio.ensure_future(asyncio.sleep(_PING_S)))
        except EngineDied:
            return
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()

    async def _launch(self, seat: Seat) -> None:
        try:
            seat.process = await asyncio.to_thread(self._launch_host, seat.name, seat.log_path)
        except RuntimeError as error:
            raise EngineLost(str(error)) from error

    async def _relaunch(self, seat: Seat) -> None:
        """Start another process in a seat; one that does not start counts as one that died."""
        try:
            await self._launch(seat)
        except EngineLost as error:
            self._count_failure(seat, str(error))
            return
        await self._catch_up(seat)

    async def _bury(self, seat: Seat, dead: Host) -> None:
        """Fail what a dead process was doing, so that it is asked for again."""
        code = dead.poll()
        seat.process, seat.version = None, -1
        self.num_restarts += 1
        dead.client.fail_all(EngineDied(f"{seat.name} died (exit {code})"))
        await _stop(dead)
        self._say(f"{seat.name} died (exit {code}); restarting it and asking again for what it was generating")
        self._count_failure(seat, f"exit {code}; its log ends:\n{dead.log_tail()}")

    def _count_failure(self, seat: Seat, reason: str) -> None:
        seat.num_failures += 1
        if seat.num_failures > self._max_restarts:
            raise EngineLost(f"{seat.name} failed {seat.num_failures} times without taking a new version: {reason}")

    async def _catch_up(self, seat: Seat) -> None:
        """Bring a fresh process to the newest version, which may move meanwhile; give up if it dies."""
        process = seat.process
        while self._ref is not None and seat.version != self._ref.version:
            if process is None or process.poll() is not None:
                return
            await self._update(seat, self._ref, interrupt=False)

    async def _update(self, seat: Seat, ref: WeightRef, interrupt: bool) -> None:
        """Move one engine to `ref`. A dead one is left to the supervisor, and so is one that does not answer."""
        process = seat.process
        if process is None:
            return
        try:
            # Sent back to back: what was interrupted must not come back before the new weights are in.
            interrupted = [asyncio.ensure_future(process.client.interrupt())] if interrupt else []
            delivered = asyncio.ensure_future(self._deliver(ref, process.client))
            await _while_alive(process, asyncio.gather(*interrupted, delivered))
        except EngineDied:
            return  # its host's `poll` says so at the next tick
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()
            return
        # A restarted engine joins at the newest version only: groups were admitted for no older one.
        if seat.process is process and (seat.alive or ref is self._ref):
            seat.version = delivered.result()
            self._signal.notify()

    async def _interrupt(self, process: Host | None) -> None:
        """A dead engine is left to the supervisor, and so is one that does not answer: both fail their requests."""
        if process is None:
            return
        try:
            await _while_alive(process, asyncio.ensure_future(process.client.interrupt()))
        except EngineDied:
            return
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()

    def _least_loaded(self) -> Seat | None:
        return min((seat for seat in self._seats if seat.alive), key=lambda seat: seat.num_pending, default=None)


async def _while_alive(process: Host, answer: "asyncio.Future[Any]") -> None:
    """Wait for an answer no longer than its process lives. Raises EngineDied, and what the answer raises."""
    while True:
        done, _ = await asyncio.wait([answer], timeout=_TICK_S)
        if done:
            return answer.result() and None
        if process.poll() is not None:
            answer.cancel()
            raise EngineDied(f"exit {process.poll()}")


async def _stop(process: Host) -> None:
    process.client.close()  # in the event loop's thread, which owns the socket
    await asyncio.to_thread(process.stop)
