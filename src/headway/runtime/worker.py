"""The old-logit worker's process: started, asked, replaced when it dies or does not answer. One thread uses it."""

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import msgspec
import zmq

from headway.errors import HeadwayError
from headway.processes.child import Server, Spawn, start_child
from headway.proximal.messages import Scored, ScoreRequest, WorkerSettings
from headway.proximal.scorer import Piece
from headway.types import Floats
from headway.wire import decode, encode

_TICK_MS = 100
"""How often the process is looked at while it computes."""


class WorkerLost(HeadwayError, RuntimeError):
    """The old-logit worker kept dying, or refused what it was asked; the message says why."""


class WorkerProcess:
    """Blocking client and supervisor in one: requests hold all they need, so one that was lost is sent again.

    `timeout_s`: an answer later than this counts as a death. `max_restarts`: deaths in a row before it is given up.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        log_path: Path,
        timeout_s: float,
        max_restarts: int,
        say: Callable[[str], None],
        spawn: Spawn = start_child,
    ) -> None:
        self._settings, self._spawn = settings, spawn
        self._log_path, self._timeout_s, self._max_restarts, self._say = log_path, timeout_s, max_restarts, say
        self._token = secrets.token_hex(16)
        self._ids = count()
        self._child: Server | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the living process."""
        return None if self._child is None else self._child.pid

    def score(self, version: int, pieces: Sequence[Piece]) -> tuple[list[Floats] | None, float]:
        """See `headway.proximal.model_source.WorkerClient`. Raises WorkerLost."""
        request = ScoreRequest(next(self._ids), version, [p.token_ids for p in pieces], [p.wanted for p in pieces])
        for death in range(self._max_restarts + 1):
            if (scored := self._ask(request)) is not None:
                if scored.error is not None:
                    raise WorkerLost(f"the old-logit worker could not score version {version}: {scored.error}")
                return scored.logprobs, scored.seconds
            self._bury(f"death {death + 1} of at most {self._max_restarts + 1}")
        raise WorkerLost(f"the old-logit worker died {self._max_restarts + 1} times in a row; see {self._log_path}")

    def close(self) -> None:
        """End the process."""
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._child is not None:
            self._child.stop()
        self._child = self._socket = None

    def _ask(self, request: ScoreRequest) -> Scored | None:
        """The answer; None when the process died, did not start, or was late."""
        try:
            socket, child = self._running()
        except RuntimeError as error:
            self._say(str(error))
            return None
        socket.send_multipart([self._token.encode(), encode(request)])
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if socket.poll(_TICK_MS):
                scored = self._decode(socket.recv())
                if scored is None or scored.id == request.id:
                    return scored
            elif child.poll() is not None:
                return None
        return None

    def _decode(self, answer: bytes) -> Scored | None:
        """None for an answer that is none: whoever sent it is as good as dead."""
        try:
            return decode(answer, Scored)
        except msgspec.MsgspecError as error:
            self._say(f"the old-logit worker sent a malformed answer: {error}")
            return None

    def _running(self) -> tuple["zmq.Socket[bytes]", Server]:
        if self._child is not None and self._socket is not None:
            return self._socket, self._child
        variables = {"HEADWAY_WORKER": msgspec.json.encode(self._settings).decode(), "HEADWAY_TOKEN": self._token}
        child = self._spawn(
            "headway.proximal.server",
            variables,
            what="the old-logit worker",
            log_path=self._log_path,
            start_timeout_s=120.0,
        )
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(child.endpoint)
        self._child, self._socket = child, socket
        return socket, child

    def _bury(self, which: str) -> None:
        self.num_restarts += 1
        self._say(f"the old-logit worker died or did not answer ({which}); starting another and asking it again")
        if self._child is not None:
            self._child.kill()
        self.close()
