"""Waiting for a condition over state that one event loop owns."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Wakes every waiter after a change; each looks again at what it waits for.

    >>> signal = Signal()
    >>> asyncio.run(signal.until(lambda: 42))
    42
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something changed. Called from the event loop's thread."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, look: Callable[[], T | None]) -> T:
        """The first value of `look()` that is neither None nor False."""
        while True:
            changed = self._changed
            value = look()
            if value is not None and value is not False:
                return value
            await changed.wait()
