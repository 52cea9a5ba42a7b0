"""Signals that end a run in order, and which of them are one and the same stop."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A service manager's stop, or a terminal that goes away, is as orderly as Ctrl-C."""

ONE_STOP_S = 1.0


class Repeats:
    """Says whether a signal is the one before once more: `timeout`, say, signals a command and then its whole group."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self) -> bool:
        """To be called at every signal."""
        before, self._last = self._last, time.monotonic()
        return self._last - before < ONE_STOP_S


@contextmanager
def stops_interrupt() -> Iterator[None]:
    """Until something handles them better, every stop is a KeyboardInterrupt, as Ctrl-C is: what was started is ended.

    A signal that is ignored, as under nohup, stays so.
    """
    plain = [sign for sign in STOPS if signal.getsignal(sign) is signal.SIG_DFL]
    for sign in plain:
        signal.signal(sign, signal.default_int_handler)
    try:
        yield
    finally:
        for sign in plain:
            signal.signal(sign, signal.SIG_DFL)


@contextmanager
def stops_heeded(*, again: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Whether a stop was asked for, as a question: an exception could come at any point, in the start of a run too.

    A second stop calls `again`. A signal that is ignored, as under nohup, stays so.
    """
    repeats, num_stops = Repeats(), 0

    def heed(sign: int, frame: FrameType | None) -> None:
        nonlocal num_stops
        if not repeats():
            num_stops += 1
            if num_stops > 1:
                again()

    signs = [sign for sign in STOPS if signal.getsignal(sign) is not signal.SIG_IGN]
    handlers = [signal.signal(sign, heed) for sign in signs]
    try:
        yield lambda: num_stops > 0
    finally:
        for sign, handler in zip(signs, handlers, strict=True):
            signal.signal(sign, handler)
