"""Who waits for whom: idle shares, and a report when a wait grows longer than its limit."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Wait:
    """One wait under way."""

    who: str
    for_whom: Callable[[], str]
    knob: str
    since: float
    reported: bool = False

    def __str__(self) -> str:
        waited = time.monotonic() - self.since
        return f"{self.who} has waited {waited:.0f} s for {self.for_whom()}; the knob: {self.knob}"


class Waits:
    """Keeps the time of every wait and reports the long ones; `waited(who, knob, begun)` hears of each one's end.

    >>> waits = Waits(limit_s=30.0, say=print)
    >>> with waits.wait("learner", lambda: "12 of 32 groups ready", knob="max_staleness"):
    ...     pass
    >>> waits.idle_s("learner") < 1
    True
    """

    def __init__(
        self,
        *,
        limit_s: float,
        say: Callable[[str], None],
        waited: Callable[[str, str, float], None] = lambda who, knob, begun: None,
    ) -> None:
        self._limit_s = limit_s
        self._say = say
        self._waited = waited
        self._current: list[Wait] = []
        self._total: dict[str, float] = {}

    @contextmanager
    def wait(self, who: str, for_whom: Callable[[], str], knob: str) -> Iterator[None]:
        """Count the body's time as idle time of `who`; `for_whom` is asked only when a report is due."""
        entry = Wait(who, for_whom, knob, time.monotonic())
        self._current.append(entry)
        try:
            yield
        finally:
            self._current.remove(entry)
            self._total[who] = self._total.get(who, 0.0) + time.monotonic() - entry.since
            self._waited(who, knob, entry.since)

    def idle_s(self, who: str) -> float:
        """Seconds `who` has waited so far, a wait under way included."""
        now = time.monotonic()
        return self._total.get(who, 0.0) + sum(now - w.since for w in self._current if w.who == who)

    def overdue(self) -> list[Wait]:
        """Waits beyond the limit, oldest first."""
        return [w for w in self._current if time.monotonic() - w.since > self._limit_s]

    async def watch(self) -> None:
        """Say who is overdue, the longest wait of each. Waits for: the clock. Ends when cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._limit_s / 4))
            told = {wait.who for wait in self._current if wait.reported}
            for wait in self.overdue():
                wait.reported = True
                if wait.who not in told:
                    self._say(f"starvation: {wait}")
                    told.add(wait.who)
