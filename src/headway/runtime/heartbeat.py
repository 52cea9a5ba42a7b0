"""Notices from outside when one call holds the event loop: says which, then interrupts it.

An environment that blocks (a request without a time-out, an endless loop) stops everything that shares the loop, the
time-outs and reports that would end it included.

| thread | consumes | produces | waits for | unblocked by |
|---|---|---|---|---|
| `Heartbeat` | beats of the loop | a report; EventLoopHeld inside the call that holds it | the clock | the clock |
"""

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from headway.errors import HeadwayError

_TICK_S = 0.2


class EventLoopHeld(HeadwayError, TimeoutError):
    """A call did not return for so long that everything else stood still."""


class Heartbeat:
    """Reports after `report_s` without a beat, and raises EventLoopHeld in the loop's thread after `limit_s`.

    The exception comes by SIGUSR2, which interrupts sleeping and waiting for sockets too; used from the main thread
    only, for no other has signals. Shutdown: the end of the `with` block.
    """

    def __init__(self, *, report_s: float, limit_s: float, say: Callable[[str], None]) -> None:
        self._report_s, self._limit_s, self._say = report_s, limit_s, say
        self._thread_id = threading.get_ident()
        self._ended = threading.Event()
        self._last = time.monotonic()
        self._previous: Any = None

    def __enter__(self) -> "Heartbeat":
        self._previous = signal.signal(signal.SIGUSR2, self._interrupt)
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.signal(signal.SIGUSR2, self._previous)

    async def beat(self) -> None:
        """Waits for: the clock. Ends when cancelled."""
        while True:
            self._last = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _watch(self) -> None:
        reported, before = False, time.monotonic()
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            if now - before > 10 * _TICK_S:
                self._last = now  # this thread stood still as well: the whole process was stopped, nobody is to blame
            before = now
            if not self._is_held(self._report_s):
                reported = False
            elif not reported:
                reported = True
                self._say(f"starvation: everything has waited {now - self._last:.0f} s for one call:\n{self._where()}")
            if self._is_held(self._limit_s):
                signal.pthread_kill(self._thread_id, signal.SIGUSR2)
                self._ended.wait(1.0)

    def _is_held(self, seconds: float) -> bool:
        return time.monotonic() - self._last > seconds

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "".join(traceback.format_stack(frame)[-4:]).rstrip()

    def _interrupt(self, sign: int, frame: FrameType | None) -> None:
        if self._is_held(self._limit_s):
            self._last = time.monotonic()
            raise EventLoopHeld(
                f"a call held the event loop for more than {self._limit_s:g} s, half of rollout.episode_timeout_s or "
                "engines.update_timeout_s; "
                "blocking work of an environment belongs into asyncio.to_thread, with a time-out of its own"
            )
