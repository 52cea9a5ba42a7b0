"""Running the loop to its end, or to the stop that a signal asks for."""

import asyncio
import signal
from collections.abc import Callable

from headway.processes.garbage import startup_frozen
from headway.processes.stops import STOPS, Repeats
from headway.runtime.heartbeat import Heartbeat
from headway.runtime.local import EnginePool
from headway.runtime.loop import Loop
from headway.runtime.scoring import TeacherStage


def run_loop(
    loop: Loop, heartbeat: Heartbeat, engines: EnginePool, stage: TeacherStage | None, *, say: Callable[[str], None]
) -> None:
    """Blocking. Raises KeyboardInterrupt after a stop, and what the loop raises.

    The first signal ends the run after the step in hand and a checkpoint, so that a resume repeats nothing; the second
    one, and one that comes outside the steps, ends it at once.
    """
    try:
        with startup_frozen():
            asyncio.run(_run_and_close(loop, heartbeat, engines, stage, say))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if loop.stopped:
        raise KeyboardInterrupt


async def _run_and_close(
    loop: Loop, heartbeat: Heartbeat, engines: EnginePool, stage: TeacherStage | None, say: Callable[[str], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    repeats = Repeats()

    def stop() -> None:
        if repeats():
            return
        if not loop.stopped and loop.stop():
            say("stopping after the step in hand and a checkpoint; the same signal again stops at once")
        else:
            task.cancel()

    for sign in STOPS:
        if sign is signal.SIGHUP and signal.getsignal(sign) is signal.SIG_IGN:
            continue  # under nohup: the run is to outlive its terminal
        asyncio.get_running_loop().add_signal_handler(sign, stop)
    with heartbeat:
        beating = asyncio.create_task(heartbeat.beat())
        try:
            await loop.run()
        finally:
            await engines.close()
            if stage is not None:
                await stage.teacher.close()
            beating.cancel()
