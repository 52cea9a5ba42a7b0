"""Where an engine runs in a pool, and who gets the next request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.engine.hosting import Host, Launch
from headway.processes.child import WANTED
from headway.protocols import EngineDied

TICK_S = 0.1
"""How often a process is looked at."""


@dataclass(slots=True, eq=False)
class Seat:
    """One place for an engine; processes come and go."""

    name: str
    log_path: Path
    process: Host | None = None
    version: int = -1
    """The oldest version that its next token may carry; −1 while it has no weights."""
    reading: int | None = None
    """A version that it was told to take and has not taken yet."""
    num_failures: int = 0
    """Deaths and failed starts since it last took a new version."""
    is_stalled: bool = False
    """It has not answered for a while, and gets no requests until it does."""
    follower: "asyncio.Task[None] | None" = None
    """Brings it to the newest version."""
    start: "asyncio.Future[Host] | None" = None
    """A start under way, or one that came to nothing."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.version >= 0

    @property
    def serves(self) -> bool:
        return self.alive and not self.is_stalled

    @property
    def num_pending(self) -> int:
        return self.process.client.num_pending if self.process is not None else 0

    def describe(self) -> str:
        """For whoever waits for it."""
        where = f"at version {self.version}" if self.alive else "starting"
        silent = ", not answering" if self.is_stalled else ""
        return f"{self.name} {where}{silent}, {self.num_pending} calls pending"


def by_load(seats: Sequence[Seat]) -> list[Seat]:
    """Those that serve, least loaded first."""
    return sorted((seat for seat in seats if seat.serves), key=lambda seat: seat.num_pending)


def pick(seats: Sequence[Seat], chosen: Seat | None, *, oldest: int, num_slots: int) -> Seat | None:
    """An engine for one more member of a group that may hold no token older than `oldest`.

    The group's own engine, whose cache knows the prompt, unless the member would queue there while another engine has
    a free slot; else the least loaded one. None while no engine will do.
    """
    fit = [seat for seat in by_load(seats) if seat.version >= oldest]
    if not fit:
        return None
    least = fit[0]
    if chosen in fit and (chosen.num_pending < num_slots or least.num_pending >= num_slots):
        return chosen
    return least


async def while_alive(
    process: Host, answer: "asyncio.Future[Any]", waited: Callable[[float], None] = lambda seconds: None
) -> None:
    """Wait for an answer no longer than its process lives; `waited` hears how long it takes.

    Raises EngineDied, and what the answer raises.
    """
    begun = time.monotonic()
    try:
        while not (await asyncio.wait([answer], timeout=TICK_S))[0]:
            if process.poll() is not None:
                raise EngineDied(f"exit {process.poll()}")
            waited(time.monotonic() - begun)
        answer.result()
    finally:
        # Given up or cancelled meanwhile: its outcome is nobody's any more, and asyncio must not complain of that.
        answer.cancel()
        answer.add_done_callback(lambda given_up: given_up.cancelled() or given_up.exception())


async def launch(seat: Seat, start: Launch, is_wanted: Callable[[], bool]) -> None:
    """Put a process into a seat; a start that is not wanted any more ends soon. Raises RuntimeError with the reason."""
    WANTED.set(is_wanted)
    seat.start = asyncio.ensure_future(asyncio.to_thread(start, seat.name, seat.log_path))
    seat.process = await asyncio.shield(seat.start)  # a thread cannot be cancelled: `vacate` waits for it
    seat.start = None


async def vacate(seat: Seat) -> None:
    """End what runs in a seat, or what was starting and has been given up."""
    process, seat.process, seat.version = seat.process, None, -1
    if seat.follower is not None:
        seat.follower.cancel()
    if process is None and seat.start is not None:
        await asyncio.wait([seat.start])
        process = seat.start.result() if seat.start.exception() is None else None
    if process is not None:
        await stop(process)


async def stop(process: Host) -> None:
    """End it in order."""
    process.client.close()  # in the event loop's thread, which owns the socket
    await asyncio.to_thread(process.stop)
