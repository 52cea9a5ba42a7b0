"""A call that holds the event loop is named, then interrupted."""

import asyncio
import signal
import time

import pytest

from headway.runtime.heartbeat import EventLoopHeld, Heartbeat


def run(work, *, report_s: float = 0.3, limit_s: float = 1.0) -> list[str]:
    said: list[str] = []

    async def main() -> None:
        with Heartbeat(report_s=report_s, limit_s=limit_s, say=said.append) as heartbeat:
            beating = asyncio.create_task(heartbeat.beat())
            try:
                await work()
            finally:
                beating.cancel()

    asyncio.run(main())
    return said


def test_a_blocking_call_is_named_and_interrupted():
    async def work() -> None:
        with pytest.raises(EventLoopHeld, match=r"asyncio\.to_thread"):
            time.sleep(60)
        await asyncio.sleep(0.3)  # the loop goes on

    begun = time.monotonic()
    said = run(work)
    assert time.monotonic() - begun < 30
    assert sum("time.sleep(60)" in line for line in said) == 1


def test_waiting_as_one_should_is_no_fault():
    async def work() -> None:
        await asyncio.sleep(3.0)

    assert run(work, report_s=2.0, limit_s=60.0) == []


def test_the_handler_of_the_signal_is_put_back():
    async def work() -> None: ...

    before = signal.getsignal(signal.SIGUSR2)
    run(work)
    assert signal.getsignal(signal.SIGUSR2) is before
