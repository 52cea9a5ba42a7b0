"""The asyncio side of an engine's process: implements `headway.protocols.Engine` over one zmq DEALER socket.

Everything runs in the event loop's thread. The socket is a plain one whose file descriptor the loop watches: a request
costs one encode and one send, a reply wakes one callback.
"""

import asyncio
from itertools import count
from typing import Any

import msgspec
import zmq

from headway.engine.messages import Cancel, Failed, Interrupt, Message, Reply, Shutdown, Status, Submit, Update
from headway.engine.request import origin_of
from headway.protocols import EngineDied, RequestRefused, WeightsRefused
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Sampling, WeightRef
from headway.wire import decode, encode

_ERRORS: dict[str, type[Exception]] = {
    "ValueError": RequestRefused,
    "WeightsRefused": WeightsRefused,
    "NotFinite": FloatingPointError,
}


class EngineClient:
    """Talks to one server. Must be used from one event loop; connects on first use.

    `timeout_s` bounds update, interrupt and status, not generation: how long that takes is the request's own matter.
    """

    def __init__(
        self, endpoint: str, token: str, *, timeout_s: float = 60.0, name: str = "torch", dtype: str = "float32"
    ) -> None:
        self.endpoint, self.name = endpoint, name
        self.last_status: EngineStatus | None = None
        """As of the latest reply."""
        self._token, self._timeout_s, self._dtype = token.encode(), timeout_s, dtype
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: Exception | None = None

    @property
    def num_pending(self) -> int:
        """Calls not yet answered."""
        return len(self._futures)

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        """Continue `token_ids`. Raises ValueError when the engine refuses the request, EngineDied when it is gone."""
        id, future = self._expect()
        self._send(Submit(id, token_ids, sampling))
        try:
            return await future
        except asyncio.CancelledError:
            if self._socket is not None:
                self._send(Cancel(id))
            raise
        finally:
            self._futures.pop(id, None)

    async def update_weights(self, ref: WeightRef) -> None:
        """Swap in flight. Raises WeightsRefused with the server's reason; it then keeps its previous version."""
        await self._call(Update, f"update to version {ref.version}", ref)

    async def interrupt(self) -> None:
        """Make every unfinished `generate` return what it has."""
        await self._call(Interrupt, "interrupt")

    async def status(self) -> EngineStatus:
        """The engine's own account of itself, now."""
        return await self._call(Status, "status")

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        """What `Completion.logprobs` were taken under; greedy requests report the plain distribution."""
        return origin_of(sampling, engine=self.name, dtype=self._dtype)

    def shutdown(self) -> None:
        """Ask the server to exit."""
        self._send(Shutdown())

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call: for whoever watches the process."""
        self._error = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()

    def close(self) -> None:
        """Hang up; pending calls raise EngineDied."""
        if self._error is None:
            self.fail_all(EngineDied(f"the client of engine {self.name!r} at {self.endpoint} was closed"))
        if self._socket is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=100)
            self._socket = None

    async def _call(self, kind: type[Any], what: str, *args: Any) -> EngineStatus:
        id, future = self._expect()
        self._send(kind(id, *args))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            raise TimeoutError(
                f"engine {self.name!r} at {self.endpoint} did not answer {what} within {self._timeout_s:g} s"
            ) from None
        finally:
            self._futures.pop(id, None)

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        id = next(self._ids)
        self._futures[id] = future
        return id, future

    def _send(self, message: Message) -> None:
        socket = self._socket or self._connect()
        socket.send_multipart([self._token, encode(message)])
        # The descriptor signals edges: a send may swallow the one that told of a reply.
        if self._loop is not None and socket.poll(0):
            self._loop.call_soon(self._receive_all)

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self.endpoint)
        self._socket, self._loop = socket, asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._receive_all)
        return socket

    def _receive_all(self) -> None:
        while self._socket is not None:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = decode(payload, Reply)
            except msgspec.MsgspecError as error:
                self.fail_all(EngineDied(f"engine {self.name!r} at {self.endpoint} sent a malformed reply: {error}"))
                return
            self._deliver(reply)

    def _deliver(self, reply: Reply) -> None:
        if reply.refused is not None:
            self.fail_all(PermissionError(f"engine {self.name!r} at {self.endpoint} refused: {reply.refused}"))
            return
        self.last_status = reply.status
        for finished in reply.finished:
            self._resolve(finished.id, finished.completion)
        for failed in reply.failed:
            self._reject(failed)
        for id in reply.done:
            self._resolve(id, reply.status)

    def _resolve(self, id: int, result: Any) -> None:
        future = self._futures.get(id)
        if future is not None and not future.done():
            future.set_result(result)

    def _reject(self, failed: Failed) -> None:
        future = self._futures.get(failed.id)
        if future is not None and not future.done():
            kind = _ERRORS.get(failed.kind)
            future.set_exception(kind(failed.text) if kind else RuntimeError(f"{failed.kind}: {failed.text}"))
