"""Which signals end a run in order."""

import asyncio
import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest

from headway.runtime.stopping import run_loop


class HungUp:
    """A loop and whatever else a run closes: its terminal goes away in the middle."""

    stopped = ended = False

    def __init__(self, *signs: signal.Signals) -> None:
        self._signs = signs

    async def run(self) -> None:
        for sign in self._signs:
            os.kill(os.getpid(), sign)
        await asyncio.sleep(0.1)
        self.ended = True

    def stop(self) -> bool:
        self.stopped = True
        return True

    async def close(self) -> None: ...

    async def beat(self) -> None: ...


class Beating(nullcontext[Any]):
    async def beat(self) -> None: ...


def hang_up(handler: Any, *signs: signal.Signals) -> HungUp:
    before = signal.signal(signal.SIGHUP, handler)
    loop: Any = HungUp(signal.SIGHUP, *signs)
    heart: Any = Beating()
    try:
        run_loop(loop, heart, loop, None, say=lambda line: None)
    except KeyboardInterrupt:
        assert loop.stopped
    finally:
        signal.signal(signal.SIGHUP, before)
    return loop


def test_a_terminal_that_goes_away_stops_the_run_in_order():
    loop = hang_up(signal.SIG_DFL)
    assert loop.stopped and loop.ended


def test_a_stop_that_reaches_the_run_twice_is_one_stop():
    loop = hang_up(signal.SIG_DFL, signal.SIGTERM)
    assert loop.stopped and loop.ended


def test_a_second_stop_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.processes.stops.ONE_STOP_S", 0.0)
    loop = hang_up(signal.SIG_DFL, signal.SIGTERM)
    assert loop.stopped and not loop.ended


def test_a_run_under_nohup_outlives_its_terminal():
    assert not hang_up(signal.SIG_IGN).stopped
