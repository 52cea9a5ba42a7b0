"""A local teacher, supervised: its process comes and goes, its scores are waited for."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headway.processes.child import Spawn, start_child
from headway.protocols import TeacherLost
from headway.teacher.client import TeacherClient, TeacherDied, TeacherProcess, start_teacher
from headway.teacher.messages import TeacherSettings
from headway.types import Ints, TeacherScores

_TICK_S = 0.1

_START_S = 600.0
"""A large model takes minutes to load."""

_AFTER_EXIT = "if memory ran out (also the GPU's), lower distill.batch_tokens"
_AFTER_NONSENSE = "see its log"
_AFTER_SILENCE = "if it is merely slow, raise distill.timeout_s or distill.num_threads, or lower distill.batch_tokens"
_AFTER_NO_START = "check distill.teacher and distill.device"


class LocalTeacher:
    """One teacher process behind `headway.protocols.Teacher`.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `run` | exit codes, silence | a new process; TeacherDied for its calls | ticks | the clock |
    | `score` | a request | scores | a living process, its answer | `run` |

    A process that owes answers and gives none for `timeout_s` is killed; what it owed is asked for again. Shutdown
    order: cancel `run`, then `close`.
    """

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        log_path: Path,
        timeout_s: float,
        max_failures: int,
        say: Callable[[str], None],
        spawn: Spawn = start_child,
    ) -> None:
        self._settings, self._log_path, self._spawn = settings, log_path, spawn
        self._timeout_s, self._max_failures, self._say = timeout_s, max_failures, say
        self._process: TeacherProcess | None = None
        self._launching: asyncio.Future[TeacherProcess] | None = None
        self._closing = False
        self._started = asyncio.Event()
        self._num_waiting = 0
        self._num_failures = 0
        """Deaths and failed starts since it last answered."""
        self._busy_before_s = 0.0
        self.num_retries = 0

    @property
    def busy_s(self) -> float:
        """Seconds its processes have computed so far."""
        return self._busy_before_s + (self._process.client.busy_s if self._process else 0.0)

    async def score(self, token_ids: Ints, query_ids: Ints, num_top: int) -> TeacherScores:
        """See `headway.protocols.Teacher`; a death on the way costs nothing but time."""
        self._num_waiting += 1
        try:
            while True:
                client = await self._living()
                try:
                    scores = await client.score(token_ids, query_ids, num_top)
                except TeacherDied:
                    self.num_retries += 1
                    if self._process is not None and self._process.client is client:
                        self._started.clear()  # nobody asks it again before the supervisor has replaced it
                    continue
                self._num_failures = 0
                return scores
        finally:
            self._num_waiting -= 1

    async def run(self) -> None:
        """Start the process, watch it, replace it. Raises TeacherLost when it keeps failing."""
        while True:
            if self._process is None:
                await self._launch()
            elif (code := self._process.child.poll()) is not None:
                await self._bury(f"exit {code}", _AFTER_EXIT)
            elif self._process.client.is_lost:
                self._process.child.kill()
                await self._bury("its answer made no sense", _AFTER_NONSENSE)
            elif self._is_silent(self._process.client):
                self._process.child.kill()
                await self._bury(f"no answer within distill.timeout_s = {self._timeout_s:g} s", _AFTER_SILENCE)
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """End the process, also one that is still loading its model."""
        self._closing = True
        self._started.clear()
        if self._process is None and self._launching is not None:
            await asyncio.wait([self._launching])
            if self._launching.exception() is None:
                self._process = self._launching.result()
        if self._process is not None:
            process, self._process = self._process, None
            process.client.close()
            await asyncio.to_thread(process.stop)

    def describe(self) -> str:
        state = "at work" if self._process else "being started"
        return f"the teacher {self._settings.model} ({state}, {self._num_waiting} requests pending)"

    async def _living(self) -> TeacherClient:
        await self._started.wait()
        assert self._process is not None
        return self._process.client

    async def _launch(self) -> None:
        start = partial(
            start_teacher,
            self._settings,
            log_path=self._log_path,
            start_timeout_s=_START_S,
            spawn=self._spawn,
            is_wanted=lambda: not self._closing,
        )
        self._launching = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            # Cancelled or not, the start goes on in its thread: `close` waits for what becomes of it.
            self._process = await asyncio.shield(self._launching)
        except RuntimeError as error:
            self._count_failure(str(error), _AFTER_NO_START)
        else:
            self._started.set()

    async def _bury(self, reason: str, mend: str) -> None:
        assert self._process is not None
        dead, self._process, self._launching = self._process, None, None
        self._started.clear()
        self._busy_before_s += dead.client.busy_s
        dead.client.fail_all(TeacherDied(reason))
        dead.client.close()
        await asyncio.to_thread(dead.stop)
        self._say(f"the teacher died ({reason}); restarting it and asking again for what it was scoring; {mend}")
        self._count_failure(f"{reason}; its log ends:\n{dead.child.log_tail()}", mend)

    def _is_silent(self, client: TeacherClient) -> bool:
        return client.num_pending > 0 and time.monotonic() - client.last_progress > self._timeout_s

    def _count_failure(self, reason: str, mend: str) -> None:
        self._num_failures += 1
        if self._num_failures > self._max_failures:
            raise TeacherLost(
                f"the teacher failed {self._num_failures} times without an answer between; {mend}, then `headway "
                f"resume` the run. The last time: {reason}"
            )
