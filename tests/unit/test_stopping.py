"""Which signals end a run in order."""

import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest

from headway.runtime.stopping import run_loop


class HungUp:
    """A loop and whatever else a run closes: its terminal goes away in the middle."""

    stopped = False

    async def run(self) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    def stop(self) -> bool:
        self.stopped = True
        return True

    async def close(self) -> None: ...

    async def beat(self) -> None: ...


class Beating(nullcontext[Any]):
    async def beat(self) -> None: ...


def hang_up(handler: Any) -> HungUp:
    before = signal.signal(signal.SIGHUP, handler)
    loop: Any = HungUp()
    heart: Any = Beating()
    try:
        run_loop(loop, heart, loop, None, say=lambda line: None)
    finally:
        signal.signal(signal.SIGHUP, before)
    return loop


def test_a_terminal_that_goes_away_stops_the_run_in_order():
    with pytest.raises(KeyboardInterrupt):
        hang_up(signal.SIG_DFL)


def test_a_run_under_nohup_outlives_its_terminal():
    assert not hang_up(signal.SIG_IGN).stopped
