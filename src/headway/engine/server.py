"""The built-in engine as a process: `python -m headway.engine.server`, one thread, one zmq ROUTER socket.

Consumes: messages of clients. Produces: replies, one a client and step. Waits for: a message, at most 0.1 s, and only
while no request is unfinished. Unblocked by: any message. Shutdown: a `Shutdown` message, SIGTERM, or the death of the
parent; requests in flight are then lost, and their clients learn it from whoever supervises the process.
"""

import hmac
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
import zmq
from torch import Tensor
from transformers import AutoConfig

from headway.engine import messages
from headway.engine.messages import EngineSettings, Failed, Finished, Message, Reply
from headway.engine.rounding import Rounding, round_weights
from headway.engine.torch_engine import NotFinite, TorchEngine
from headway.protocols import WeightsRefused
from headway.types import WeightRef
from headway.wire import decode, encode

IDLE_MS = 100
MAX_MESSAGE_BYTES = 64 << 20


class Key(NamedTuple):
    """A submission among all clients; shown by the number its client gave it."""

    client: bytes
    id: int

    def __repr__(self) -> str:
        return str(self.id)


class EngineServer:
    """Serves one engine on one bound ROUTER socket."""

    def __init__(
        self,
        engine: TorchEngine,
        socket: zmq.Socket[bytes],
        *,
        token: str,
        read_weights: Callable[[WeightRef], Mapping[str, Tensor]],
        parent_pid: int,
        rounding: Rounding = "none",
    ) -> None:
        self._engine, self._socket, self._read_weights = engine, socket, read_weights
        self._token, self._parent_pid = token.encode(), parent_pid
        self._rounding: Rounding = rounding
        self._outbox: dict[bytes, Reply] = {}
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the message or step in hand."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop or orphaned."""
        while not self._stopping and os.getppid() == self._parent_pid:
            if self._socket.poll(0 if self._engine.has_work else IDLE_MS):
                self._receive_all()
            if self._engine.has_work:
                self._step()
            self._send_all()

    def _receive_all(self) -> None:
        while not self._stopping:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            _warn(f"ignored a message of {len(frames) - 1} frames, expected 2: token and payload")
            return
        client, token, payload = frames
        if not hmac.compare_digest(token, self._token):
            _warn("refused a message with a wrong token")
            self._socket.send_multipart([client, encode(Reply(refused="wrong token"))])
            return
        try:
            message = decode(payload, Message)  # type: ignore[arg-type]  # a union is a type to msgspec
        except msgspec.MsgspecError as error:
            _warn(f"ignored a malformed message: {error}")
            return
        self._obey(client, message)

    def _obey(self, client: bytes, message: Any) -> None:
        match message:
            case messages.Submit(id, token_ids, sampling):
                try:
                    self._engine.submit(Key(client, id), token_ids, sampling)
                except ValueError as error:
                    self._fail(client, id, error)
            case messages.Cancel(id):
                self._engine.cancel(Key(client, id))
            case messages.Update(id, ref):
                self._update(client, id, ref)
            case messages.Interrupt(id):
                self._finish(self._engine.interrupt())
                self._reply_to(client).done.append(id)
            case messages.Status(id):
                self._reply_to(client).done.append(id)
            case messages.Shutdown():
                self.stop()

    def _update(self, client: bytes, id: int, ref: WeightRef) -> None:
        try:
            self._engine.load(round_weights(self._read_weights(ref), self._rounding), ref.version)
        except Exception as error:  # whatever is wrong with a version, the previous one goes on serving
            if not isinstance(error, WeightsRefused):
                error = WeightsRefused(f"version {ref.version} could not be read: {type(error).__name__}: {error}")
            _warn(f"kept version {self._engine.version}: {error}")
            self._fail(client, id, error)
        else:
            self._reply_to(client).done.append(id)

    def _step(self) -> None:
        try:
            self._finish(self._engine.step())
        except NotFinite as error:
            _warn(str(error))
            for key in self._engine.clear():
                self._fail(key.client, key.id, error)

    def _finish(self, finished: list[tuple[Key, Any]]) -> None:
        for key, completion in finished:
            self._reply_to(key.client).finished.append(Finished(key.id, completion))

    def _fail(self, client: bytes, id: int, error: Exception) -> None:
        self._reply_to(client).failed.append(Failed(id, type(error).__name__, str(error)))

    def _reply_to(self, client: bytes) -> Reply:
        return self._outbox.setdefault(client, Reply(finished=[], failed=[], done=[]))

    def _send_all(self) -> None:
        if not self._outbox:
            return
        status = self._engine.status
        for client, reply in self._outbox.items():
            self._socket.send_multipart([client, encode(msgspec.structs.replace(reply, status=status))])
        self._outbox = {}


def main() -> None:
    """Build the engine from HEADWAY_ENGINE, print `{"endpoint": …, "pid": …}` and serve."""
    from headway.weights import read_weights

    settings = msgspec.json.decode(os.environ["HEADWAY_ENGINE"], type=EngineSettings)
    token = os.environ["HEADWAY_TOKEN"]
    if not token:
        raise SystemExit("HEADWAY_TOKEN is empty: the engine's server asks every client for a token")
    torch.set_num_threads(settings.num_threads)
    engine = TorchEngine(
        AutoConfig.from_pretrained(settings.config),
        max_slots=settings.max_slots,
        max_length=settings.max_length,
        device=settings.device,
        dtype=getattr(torch, settings.dtype),
        on_update=settings.on_update,
        record_logprobs=settings.record_logprobs,
        record_entropy=settings.record_entropy,
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would make a ROUTER drop replies
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings.bind)
        server = EngineServer(
            engine,
            socket,
            token=token,
            read_weights=read_weights,
            parent_pid=settings.parent_pid or os.getppid(),
            rounding=settings.round_weights,
        )
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        print(json.dumps({"endpoint": socket.getsockopt_string(zmq.LAST_ENDPOINT), "pid": os.getpid()}), flush=True)
        os.dup2(2, 1)  # the parent reads one line and no more
        server.run()


def _warn(text: str) -> None:
    print(f"headway engine: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
