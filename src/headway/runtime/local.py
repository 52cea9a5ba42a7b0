"""Engine processes on this machine: started, supervised, restarted, and seen by the loop as one pool."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from headway.engine.hosting import Host, Launch
from headway.errors import HeadwayError
from headway.protocols import Engine, EngineDied
from headway.runtime.seats import TICK_S, Seat, by_load, launch, pick, stop, vacate, while_alive
from headway.runtime.signal import Signal
from headway.types import EngineStatus, WeightRef

_PING_S = 5.0
"""How often an engine is asked whether it still answers."""


Deliver = Callable[[WeightRef, Engine], Awaitable[int]]
Check = Callable[[int, Mapping[str, Engine]], Awaitable[None]]
"""Is told a version and an engine that holds it, by name."""


async def hand_over(ref: WeightRef, engine: Engine) -> int:
    """Have the engine read a file."""
    await engine.update_weights(ref)
    return ref.version


async def trust(version: int, engines: Mapping[str, Engine]) -> None:
    """Check nothing."""


class EngineLost(HeadwayError, RuntimeError):
    """An engine kept dying; the message holds the end of its log."""


class EnginePool:
    """Several engines behind one face: routing by load with group affinity, updates, supervision.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `supervise` | exit codes, silence | a new process; EngineDied for calls that are lost | ticks | the clock |
    | `_catch_up`, one a seat | the newest version | an engine on it | the engine | the engine, `supervise` |

    Each engine takes versions as fast as it can, always the newest: one that is slow or dead holds up nobody.
    Shutdown order: cancel `supervise`, then `close` (STOP, then SIGKILL after a grace time).

    `num_slots`: sequences one engine decodes together. `patience_s`: how long an update waits for engines that are
    slower than the first. `stall_s`: an engine silent for longer gets no requests, and its own are asked elsewhere.
    """

    def __init__(
        self,
        start_host: Launch,
        *,
        num_engines: int,
        logs: Path,
        signal: Signal,
        num_slots: int,
        max_restarts: int,
        patience_s: float,
        stall_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._seats = [Seat(f"engine-{i}", logs / f"engine-{i}.log") for i in range(num_engines)]
        self._start_host, self._is_closing = start_host, False
        self._signal = signal
        self._num_slots = num_slots
        self._max_restarts = max_restarts
        self._patience_s, self._stall_s = patience_s, stall_s
        self._say = say
        self._ref: WeightRef | None = None
        self._deliver, self._check = hand_over, trust
        self.num_restarts = 0

    async def start(self, ref: WeightRef, deliver: Deliver = hand_over, check: Check = trust) -> None:
        """Start all processes and give them their first weights. Raises EngineLost when one does not get there.

        `deliver(ref, engine)` brings one engine to a version, and says which it then holds. `check` is told whenever
        one has arrived, and that one takes no other version meanwhile; what it raises, the pool raises.
        """
        self._deliver, self._check = deliver, check
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

    def version_for(self, admits: Callable[[int], bool]) -> int | None:
        """The version of the least loaded engine at which one more group is admitted; None where there is none."""
        return next((seat.version for seat in by_load(self._seats) if admits(seat.version)), None)

    def versions_in_use(self) -> set[int]:
        """All that an engine samples with or reads."""
        held = {seat.version for seat in self._seats if seat.alive}
        return held | {seat.reading for seat in self._seats if seat.reading is not None}

    def affine(self, oldest: int = 0) -> Callable[[], Awaitable[Engine]]:
        """A picker for one group that may hold no token older than `oldest`: by load, with affinity (`seats.pick`)."""
        chosen: Seat | None = None

        async def next_engine() -> Engine:
            nonlocal chosen
            look = partial(pick, self._seats, chosen, oldest=oldest, num_slots=self._num_slots)
            chosen = await self._signal.until(look)
            assert chosen.process is not None
            return chosen.process.client

        return next_engine

    async def update(self, ref: WeightRef, *, everyone: bool = False) -> None:
        """Have all engines take a new version, each as soon as it can. Raises WeightsRefused.

        Returns when one has it and those that kept up so far have it too, or patience is over; the others follow.
        `everyone`: returns only when every engine has it, restarted ones included.
        """
        self._ref = ref
        followers = [self._follow(seat) for seat in self._seats if seat.serves and seat.follower is None]
        if followers:
            done, _ = await asyncio.wait(followers, timeout=None if everyone else self._patience_s)
            for follower in done:
                follower.result()
        enough = all if everyone else any
        await self._signal.until(lambda: enough(seat.version >= ref.version for seat in self._seats))

    async def interrupt(self) -> None:
        """Make every unfinished request of every living engine return what it has."""
        await asyncio.gather(*(self._interrupt(seat.process) for seat in self._seats if seat.alive))

    def describe(self) -> str:
        """Every engine and where it stands, for whoever waits for one."""
        wanted = self._ref.version if self._ref else 0
        states = map(Seat.describe, self._seats)
        return f"engines to hold version {wanted} ({'; '.join(states)})"

    def statuses(self) -> dict[str, EngineStatus]:
        """What the living engines last said of themselves, by name; it comes with every reply."""
        living = {seat.name: seat.process.client for seat in self._seats if seat.process is not None and seat.alive}
        return {name: client.last_status for name, client in living.items() if client.last_status is not None}

    def metrics(self) -> dict[str, Any]:
        """How many engines serve, and how many versions each is behind the newest that all were told of."""
        newest = self._ref.version if self._ref else 0
        # One that was given a whole version may already be ahead of what all were told of.
        lags = {seat.name: max(0, newest - seat.version) for seat in self._seats if seat.alive}
        serving = sum(seat.serves for seat in self._seats)
        return {"num_engines_serving": serving, "engine_lag": lags, "engine_lag_max": max(lags.values(), default=0)}

    async def supervise(self) -> None:
        """Replace processes that died. Raises EngineLost when one keeps dying."""
        async with asyncio.TaskGroup() as tasks:
            for seat in self._seats:
                tasks.create_task(self._keep_alive(seat))

    async def close(self) -> None:
        """End every process, those that are starting too."""
        self._is_closing = True
        await asyncio.gather(*map(vacate, self._seats))

    async def _keep_alive(self, seat: Seat) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if seat.follower is not None and seat.follower.done():
                seat.follower.result()
                seat.follower = None
            if seat.process is None:
                await self._relaunch(seat)
            elif seat.process.poll() is not None:
                await self._bury(seat, seat.process)
            elif seat.follower is None and self._ref is not None and seat.version < self._ref.version:
                self._follow(seat)
            elif seat.alive:
                await self._ping(seat, seat.process)

    async def _ping(self, seat: Seat, process: Host) -> None:
        """A process that lives but does not answer is left alone for a while, and then as good as dead."""
        try:
            answer = asyncio.ensure_future(process.client.status())
            await while_alive(process, answer, partial(self._heard_nothing, seat, process))
            if seat.is_stalled:
                seat.is_stalled = False
                self._say(f"{seat.name} answers again")
                self._signal.notify()
                return  # it may lag: look at once
            await while_alive(process, asyncio.ensure_future(asyncio.sleep(_PING_S)))
        except EngineDied:
            return
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()

    def _heard_nothing(self, seat: Seat, process: Host, seconds: float) -> None:
        others = any(other.serves for other in self._seats if other is not seat)
        if seconds > self._stall_s and others and not seat.is_stalled:
            seat.is_stalled = True
            reason = f"{seat.name} has not answered for {self._stall_s:g} s"
            self._say(f"{reason}; asking other engines for what it was generating")
            process.client.give_back(EngineDied(reason))
            self._signal.notify()

    async def _launch(self, seat: Seat) -> None:
        try:
            await launch(seat, self._start_host, lambda: not self._is_closing)
        except RuntimeError as error:
            raise EngineLost(str(error)) from error

    async def _relaunch(self, seat: Seat) -> None:
        """Start another process in a seat; one that does not start counts as one that died."""
        try:
            await self._launch(seat)
        except EngineLost as error:
            self._count_failure(seat, str(error))
            return
        # Watched like any other; but that it takes what the others have already is no sign yet that it will live.
        seat.follower = asyncio.create_task(self._catch_up(seat))

    async def _bury(self, seat: Seat, dead: Host) -> None:
        """Fail what a dead process was doing, so that it is asked for again."""
        code = dead.poll()
        seat.process, seat.version, seat.is_stalled = None, -1, False
        self.num_restarts += 1
        dead.client.fail_all(EngineDied(f"{seat.name} died (exit {code})"))
        await stop(dead)
        self._say(f"{seat.name} died (exit {code}); restarting it and asking again for what it was generating")
        self._count_failure(seat, f"exit {code}; its log ends:\n{dead.log_tail()}")

    def _count_failure(self, seat: Seat, reason: str) -> None:
        seat.num_failures += 1
        if seat.num_failures > self._max_restarts:
            raise EngineLost(f"{seat.name} failed {seat.num_failures} times without taking a new version: {reason}")

    def _follow(self, seat: Seat) -> "asyncio.Task[None]":
        seat.follower = asyncio.create_task(self._catch_up(seat))
        seat.follower.add_done_callback(partial(self._followed, seat))
        return seat.follower

    def _followed(self, seat: Seat, follower: "asyncio.Task[None]") -> None:
        # One that failed stays, for `supervise` to raise.
        if seat.follower is follower and not follower.cancelled() and follower.exception() is None:
            seat.follower = None
            has_newest = self._ref is not None and seat.version >= self._ref.version
            seat.num_failures = 0 if has_newest else seat.num_failures

    async def _catch_up(self, seat: Seat) -> None:
        """Bring an engine to the newest version, which may move meanwhile; give up if it dies."""
        process = seat.process
        while process is not None and self._ref is not None and seat.version < self._ref.version:
            if process.poll() is not None or not await self._update(seat, process, self._ref):
                return
            with suppress(EngineDied):
                told = self._check(seat.version, {seat.name: process.client})
                await while_alive(process, asyncio.ensure_future(told))

    async def _update(self, seat: Seat, process: Host, ref: WeightRef) -> bool:
        """Move one engine to `ref`, and say if that went well. One that is lost is left to the supervisor."""
        seat.reading = ref.version
        try:
            delivered = asyncio.ensure_future(self._deliver(ref, process.client))
            await while_alive(process, delivered)
        except EngineDied:
            return False  # its host's `poll` says so at the next tick
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()
            return False
        finally:
            seat.reading = None
        if seat.process is not process:
            return False
        # A restarted engine joins at the newest version only: groups were admitted for no older one.
        if seat.alive or ref is self._ref:
            seat.version = delivered.result()
            self._signal.notify()
        return True

    async def _interrupt(self, process: Host | None) -> None:
        """A dead engine is left to the supervisor, and so is one that does not answer: both fail their requests."""
        if process is None:
            return
        try:
            await while_alive(process, asyncio.ensure_future(process.client.interrupt()))
        except EngineDied:
            return
        except TimeoutError as error:
            self._say(f"{error}; killing it")
            process.kill()
