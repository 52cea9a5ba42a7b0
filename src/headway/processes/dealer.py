"""The asyncio end: one zmq DEALER socket, requests by number, replies to whoever awaits them.

Everything runs in the event loop's thread. The socket is a plain one whose file descriptor the loop watches: a reply
wakes one callback, and all requests of one turn of the loop leave together. Each call into zmq gives the interpreter
away, and beside a learner it takes its time to come back.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from headway.processes.router import MAX_MESSAGE_BYTES
from headway.wire import encode

MAX_REPLY_BYTES = 1 << 30


class Dealer:
    """Sends messages to one server and keeps the futures of its answers. One event loop; connects on first use.

    `receive(payload)` is called with every reply. `gone` is the exception that a hung-up call raises.
    """

    def __init__(self, endpoint: str, token: str, *, receive: Callable[[bytes], None]) -> None:
        self.endpoint = endpoint
        self._token, self._receive = token.encode(), receive
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[bytes] = []
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: Exception | None = None

    @property
    def num_pending(self) -> int:
        """Calls not yet answered."""
        return len(self._futures)

    @property
    def is_lost(self) -> bool:
        """Whether every later call fails."""
        return self._error is not None

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def expect(self) -> tuple[int, "asyncio.Future[Any]"]:
        """A new call's number and the future of its answer. Raises what `fail_all` was given."""
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Whoever waits may be canceled in the turn of the loop that fails the call; that is no error of anyone.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        id = next(self._ids)
        self._futures[id] = future
        return id, future

    def forget(self, id: int) -> None:
        """Its caller has gone on."""
        self._futures.pop(id, None)

    def resolve(self, id: int, result: Any) -> None:
        """Answer a call; one that nobody awaits any more is no error."""
        future = self._futures.get(id)
        if future is not None and not future.done():
            future.set_result(result)

    def reject(self, id: int, error: Exception) -> None:
        future = self._futures.get(id)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call: for whoever watches the process."""
        self._error = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()

    def close(self, error: Exception) -> None:
        """Hang up; pending calls raise `error`, unless they were failed before."""
        if self._error is None:
            self.fail_all(error)
        if self._socket is not None and self._loop is not None:
            self._empty_outbox()
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=100)
            self._socket = None

    def send(self, message: Any) -> None:
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:  # the server would hang up, and nobody would answer
            raise ValueError(f"a request of {len(payload):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}")
        if self._socket is None:
            self._connect()
        if not self._outbox and self._loop is not None:
            self._loop.call_soon(self._send_all)
        self._outbox.append(payload)

    def _send_all(self) -> None:
        try:
            self._empty_outbox()
        except zmq.ZMQError as error:  # nobody is there to raise it to
            self.fail_all(error)
            return
        # The descriptor signals edges: a send may swallow the one that told of a reply.
        if self._socket is not None and self._loop is not None and self._socket.poll(0):
            self._loop.call_soon(self._receive_all)

    def _empty_outbox(self) -> None:
        payloads, self._outbox = self._outbox, []
        if self._socket is not None and payloads:  # else closed in the meantime
            self._socket.send_multipart([self._token, *payloads])

    def _connect(self) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        socket.connect(self.endpoint)
        self._socket, self._loop = socket, asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._receive_all)

    def _receive_all(self) -> None:
        while self._socket is not None:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(payload)
