"""The asyncio side of a teacher's process."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.errors import AccessRefused
from headway.processes.child import Server, Spawn, start_child
from headway.processes.dealer import Dealer
from headway.protocols import RequestRefused
from headway.teacher.messages import Score, Scored, TeacherSettings
from headway.types import Ints, TeacherScores
from headway.wire import decode


class TeacherDied(ConnectionError):
    """The teacher's process is gone; what it was scoring must be asked for again."""


class TeacherClient:
    """Talks to one server. Must be used from one event loop; connects on first use."""

    def __init__(self, endpoint: str, token: str) -> None:
        self._dealer = Dealer(endpoint, token, receive=self._receive)
        self.busy_s = 0.0
        """Seconds the teacher has computed, as of its latest answer."""
        self.last_progress = time.monotonic()
        """When it last answered, or was first asked while idle."""

    @property
    def num_pending(self) -> int:
        return self._dealer.num_pending

    @property
    def is_lost(self) -> bool:
        """Whether the server's answers made no sense, or the client was told to give up."""
        return self._dealer.is_lost

    async def score(self, token_ids: Ints, query_ids: Ints, num_top: int) -> TeacherScores:
        """See `headway.protocols.Teacher`. Raises RequestRefused, TeacherDied."""
        if not self.num_pending:
            self.last_progress = time.monotonic()
        id, future = self._dealer.expect()
        self._dealer.send(Score(id, token_ids, query_ids, num_top))
        try:
            return await future
        finally:
            self._dealer.forget(id)

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call."""
        self._dealer.fail_all(error)

    def close(self) -> None:
        self._dealer.close(TeacherDied("the teacher's client was closed"))

    def _receive(self, payload: bytes) -> None:
        self.last_progress = time.monotonic()
        try:
            answer = decode(payload, Scored)
        except msgspec.MsgspecError as error:
            self.fail_all(TeacherDied(f"the teacher sent a malformed answer: {error}"))
            return
        self.busy_s = max(self.busy_s, answer.busy_s)
        if answer.scores is not None:
            self._dealer.resolve(answer.id, answer.scores)
        elif answer.id >= 0:
            self._dealer.reject(answer.id, RequestRefused(f"the teacher refused: {answer.refused}"))
        else:
            self.fail_all(AccessRefused(f"the teacher refused: {answer.refused}"))


@dataclass(frozen=True, slots=True)
class TeacherProcess:
    """A running teacher and a client that talks to it."""

    child: Server
    client: TeacherClient

    def stop(self) -> int:
        """End it; returns the exit code."""
        return self.child.stop()


def start_teacher(
    settings: TeacherSettings,
    *,
    log_path: Path,
    start_timeout_s: float,
    spawn: Spawn = start_child,
    is_wanted: Callable[[], bool] = lambda: True,
) -> TeacherProcess:
    """Start the server and wait until it has loaded its model; blocking, seconds to minutes. Raises RuntimeError."""
    token = secrets.token_hex(16)
    variables = {"HEADWAY_TEACHER": msgspec.json.encode(settings).decode(), "HEADWAY_TOKEN": token}
    child = spawn(
        "headway.teacher.server",
        variables,
        what="teacher",
        log_path=log_path,
        start_timeout_s=start_timeout_s,
        is_wanted=is_wanted,
    )
    return TeacherProcess(child, TeacherClient(child.endpoint, token))
