"""The serving end: one bound zmq ROUTER socket that asks every client for a token and refuses malformed messages."""

import hmac
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from headway.processes.child import LOOPBACK, STOP
from headway.wire import decode, encode

MAX_MESSAGE_BYTES = 64 << 20

_TICK_S = 0.25
"""How often the parent is looked for."""


@contextmanager
def bound_router(*, max_bytes: int = MAX_MESSAGE_BYTES) -> Iterator["zmq.Socket[bytes]"]:
    """A ROUTER socket on a free port of HEADWAY_HOST (loopback unless the parent says otherwise).

    A client that sends a longer message than `max_bytes` is hung up on.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would make a ROUTER drop replies
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"tcp://{os.environ.get('HEADWAY_HOST', LOOPBACK)}:*")
        yield socket


def announce(socket: "zmq.Socket[bytes]", stop: Callable[[], None]) -> None:
    """Stop on STOP, and tell the parent where to connect: one line `{"endpoint": …, "pid": …}`."""
    signal.signal(STOP, lambda *_: stop())
    # A terminal, `timeout` and service managers signal the whole group; the parent decides what it means.
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    print(json.dumps({"endpoint": socket.getsockopt_string(zmq.LAST_ENDPOINT), "pid": os.getpid()}), flush=True)
    os.dup2(2, 1)  # the parent reads one line and no more


def end_with_parent() -> None:
    """From now on end at once, whatever is being computed, when HEADWAY_PARENT (or who started this one) is gone."""
    parent = int(os.environ.get("HEADWAY_PARENT", os.getppid()))
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    os._exit(1)  # nobody is left to be told, and the other threads may be in a call that takes minutes


def token_from_environment() -> str:
    """HEADWAY_TOKEN. Raises SystemExit when it is empty."""
    token = os.environ["HEADWAY_TOKEN"]
    if not token:
        raise SystemExit("HEADWAY_TOKEN is empty: the server asks every client for a token")
    return token


class Router:
    """What is waiting on the socket, checked: messages of type `kind` from clients that know the token.

    A wrong token is answered with `refusal`; what is malformed is said to `warn` and dropped.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", *, token: str, kind: Any, refusal: Any, warn: Callable[[str], None]
    ) -> None:
        self._socket, self._token, self._kind = socket, token.encode(), kind
        self._refusal, self._warn = encode(refusal), warn

    def poll(self, timeout_ms: int) -> bool:
        """Whether a message waits, after at most `timeout_ms`."""
        return bool(self._socket.poll(timeout_ms))

    def messages(self) -> Iterator[tuple[bytes, Any]]:
        """(client, message) of everything that waits now."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for payload in self._accept(frames):
                if (message := self._decode(payload)) is not None:
                    yield frames[0], message

    def send(self, client: bytes, reply: Any) -> None:
        self._socket.send_multipart([client, encode(reply)])

    def _accept(self, frames: list[bytes]) -> list[bytes]:
        """The payloads of a client that knows the token: any number, sent together."""
        if len(frames) < 3:
            self._warn(f"ignored a message of {len(frames) - 1} frames, expected a token and payloads")
            return []
        client, token, *payloads = frames
        if not hmac.compare_digest(token, self._token):
            self._warn("refused a message with a wrong token")
            self._socket.send_multipart([client, self._refusal])
            return []
        return payloads

    def _decode(self, payload: bytes) -> Any:
        try:
            return decode(payload, self._kind)
        except msgspec.MsgspecError as error:
            self._warn(f"ignored a malformed message: {error}")
            return None


def warn_as(name: str) -> Callable[[str], None]:
    """Lines on stderr, which is the process's log."""
    return lambda text: print(f"headway {name}: {text}", file=sys.stderr, flush=True)
