"""The built-in engine as a process: `python -m headway.engine.server`, one zmq ROUTER socket.

One thread serves and computes; another reads new weights, so that decoding goes on until they are whole.

Consumes: messages of clients. Produces: replies, one a client and step. Waits for: a message, at most 0.1 s (2 ms while
a version is being read), and only while no request is unfinished. Unblocked by: any message. Shutdown: a `Shutdown`
message, STOP, or the death of the parent; requests in flight are then lost, and their clients learn it from whoever
supervises the process.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import torch
import zmq
from torch import Tensor
from transformers import AutoConfig

from headway.engine import messages
from headway.engine.messages import EngineSettings, Failed, Finished, Message, Reply
from headway.engine.rounding import Rounding, round_weights
from headway.engine.torch_engine import TorchEngine
from headway.processes.garbage import startup_frozen
from headway.processes.router import (
    Router,
    announce,
    bound_router,
    end_with_parent,
    token_from_environment,
    warn_as,
)
from headway.protocols import NotFinite, WeightsRefused
from headway.types import WeightRef

IDLE_MS, READING_MS = 100, 2


class Key(NamedTuple):
    """A submission among all clients; shown by the number its client gave it."""

    client: bytes
    id: int

    def __repr__(self) -> str:
        return str(self.id)


class Reading(NamedTuple):
    """An update under way."""

    client: bytes
    id: int
    version: int
    tensors: "Future[dict[str, Tensor]]"


class EngineServer:
    """Serves one engine on one bound ROUTER socket.

    `hands_back`: every version that the engine takes ends what is unfinished with what it has, in the same moment: what
    is asked again is cached anew, however the version came, and a version that is refused interrupts nothing.
    """

    def __init__(
        self,
        engine: TorchEngine,
        socket: zmq.Socket[bytes],
        *,
        token: str,
        read_weights: Callable[[WeightRef], Mapping[str, Tensor]],
        rounding: Rounding = "none",
        hands_back: bool = False,
    ) -> None:
        self._engine, self._read_weights = engine, read_weights
        self._hands_back = hands_back
        self._router = Router(socket, token=token, kind=Message, refusal=Reply(refused="wrong token"), warn=_warn)
        self._rounding: Rounding = rounding
        self._outbox: dict[bytes, Reply] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._readings: deque[Reading] = deque()
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the message or step in hand."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            patience = READING_MS if self._readings else IDLE_MS
            if self._router.poll(0 if self._engine.has_work else patience):
                self._receive_all()
            self._load_what_is_read()
            if self._engine.has_work:
                self._step()
            self._send_all()

    def _receive_all(self) -> None:
        for client, message in self._router.messages():
            self._obey(client, message)
            if self._stopping:
                return

    def _obey(self, client: bytes, message: Any) -> None:
        match message:
            case messages.Submit():
                self._submit(client, message)
            case messages.Cancel(id):
                self._engine.cancel(Key(client, id))
            case messages.Update(id, ref):
                self._readings.append(Reading(client, id, ref.version, self._reader.submit(self._read, ref)))
            case messages.Interrupt(id):
                self._finish(self._engine.interrupt())
                self._reply_to(client).done.append(id)
            case messages.Status(id):
                self._reply_to(client).done.append(id)
            case messages.Shutdown():
                self.stop()

    def _submit(self, client: bytes, message: messages.Submit) -> None:
        try:
            self._engine.submit(Key(client, message.id), message.token_ids, message.sampling)
        except ValueError as error:
            self._fail(client, message.id, error)

    def _read(self, ref: WeightRef) -> dict[str, Tensor]:
        return round_weights(self._read_weights(ref), self._rounding)

    def _load_what_is_read(self) -> None:
        while self._readings and self._readings[0].tensors.done():
            self._load(self._readings.popleft())

    def _load(self, reading: Reading) -> None:
        try:
            self._engine.load(reading.tensors.result(), reading.version)
        except Exception as error:  # whatever is wrong with a version, the previous one goes on serving
            if not isinstance(error, WeightsRefused):
                error = WeightsRefused(f"version {reading.version} could not be read: {type(error).__name__}: {error}")
            _warn(f"kept version {self._engine.version}: {error}")
            self._fail(reading.client, reading.id, error)
        else:
            if self._hands_back:
                self._finish(self._engine.interrupt())
            self._reply_to(reading.client).done.append(reading.id)

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
            self._router.send(client, msgspec.structs.replace(reply, status=status))
        self._outbox = {}


def main() -> None:
    """Build the engine from HEADWAY_ENGINE, print `{"endpoint": …, "pid": …}` and serve."""
    from headway.weights import WeightReader

    end_with_parent()
    settings = msgspec.json.decode(os.environ["HEADWAY_ENGINE"], type=EngineSettings)
    token = token_from_environment()
    torch.set_num_threads(settings.num_threads)
    engine = TorchEngine(
        AutoConfig.from_pretrained(settings.config),
        max_slots=settings.max_slots,
        max_length=settings.max_length,
        device=settings.device,
        dtype=getattr(torch, settings.dtype),
        on_update="recompute" if settings.on_update == "recompute" else "keep",
        record_logprobs=settings.record_logprobs,
        record_entropy=settings.record_entropy,
    )
    with bound_router() as socket:
        server = EngineServer(
            engine,
            socket,
            token=token,
            read_weights=WeightReader(settings.device).read,
            rounding=settings.round_weights,
            hands_back=settings.on_update == "interrupt",
        )
        announce(socket, server.stop)
        with startup_frozen():
            server.run()


_warn = warn_as("engine")


if __name__ == "__main__":
    main()
