"""Who may ask a server for tokens, and when."""

import asyncio
from heapq import heappop, heappush
from itertools import count


class Turnstile:
    """At most `num_slots` inside; waiting ones of a lower priority number first; nobody enters while it is shut.

    A request that is still outside when new weights come in thus meets nothing that older weights cached.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        self._is_shut = False

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for *_, future in self._waiting)

    async def enter(self, priority: int) -> bool:
        """Wait for a slot, which `leave` gives back. False, with no slot: turned away."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (priority, next(self._order), future))
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.leave()
            raise

    def leave(self) -> None:
        self._free += 1
        self._admit()

    def shut(self) -> None:
        self._is_shut = True

    def open(self) -> None:
        self._is_shut = False
        self._admit()

    def turn_away(self) -> None:
        """Send home all who wait."""
        for *_, future in self._waiting:
            if not future.done():
                future.set_result(False)
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and self._free and not self._is_shut:
            *_, future = heappop(self._waiting)
            if not future.done():
                self._free -= 1
                future.set_result(True)
