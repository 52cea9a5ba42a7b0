"""The old-logit worker: `python -m headway.proximal.server`, one thread, one zmq ROUTER socket.

Consumes: requests to score. Produces: one reply to each. Waits for: a message, at most 0.1 s. Unblocked by: any
message. Shutdown: SIGTERM or the death of the parent. It keeps no state but mapped parameters, so a request that died
with it is simply sent to its successor.
"""

import hmac
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch
import zmq
from torch import Tensor

from headway.models.loading import load_causal_lm
from headway.proximal.messages import Scored, ScoreRequest, WorkerSettings
from headway.proximal.scorer import Piece, Scorer
from headway.proximal.snapshots import SnapshotGone, SnapshotStore
from headway.wire import decode, encode

IDLE_MS = 100


class Worker:
    """Scores pieces under any version that the store holds."""

    def __init__(self, scorer: Scorer, store: SnapshotStore) -> None:
        self._scorer, self._store = scorer, store
        self._parameters: dict[int, dict[str, Tensor]] = {}

    def answer(self, request: ScoreRequest) -> Scored:
        begun = time.monotonic()
        try:
            parameters = self._read(request.version)
        except SnapshotGone:
            return Scored(request.id, None)
        pieces = [Piece(ids, wanted) for ids, wanted in zip(request.token_ids, request.wanted, strict=True)]
        try:
            found = self._scorer.score(pieces, parameters)
        except (RuntimeError, ValueError, IndexError) as error:  # a bad request must not end the worker
            return Scored(request.id, None, error=f"{type(error).__name__}: {error}")
        return Scored(request.id, found, time.monotonic() - begun)

    def _read(self, version: int) -> dict[str, Tensor]:
        """Mapped once while the file is kept."""
        kept = set(self._store.versions())
        self._parameters = {v: tensors for v, tensors in self._parameters.items() if v in kept}
        if version not in self._parameters:
            self._parameters[version] = self._store.read(version)
        return self._parameters[version]


def serve(worker: Worker, socket: "zmq.Socket[bytes]", *, token: str, parent_pid: int) -> None:
    """Answer until orphaned."""
    while os.getppid() == parent_pid:
        if not socket.poll(IDLE_MS):
            continue
        frames = socket.recv_multipart()
        if len(frames) != 3 or not hmac.compare_digest(frames[1], token.encode()):
            _warn("ignored a message without the right token")
            continue
        try:
            request = decode(frames[2], ScoreRequest)
        except msgspec.MsgspecError as error:
            _warn(f"ignored a malformed message: {error}")
            continue
        socket.send_multipart([frames[0], encode(worker.answer(request))])


def main() -> None:
    """Build the worker from HEADWAY_WORKER, print `{"endpoint": …, "pid": …}` and serve."""
    settings = msgspec.json.decode(os.environ["HEADWAY_WORKER"], type=WorkerSettings)
    token = os.environ["HEADWAY_TOKEN"]
    if not token:
        raise SystemExit("HEADWAY_TOKEN is empty: the worker asks every client for a token")
    torch.set_num_threads(settings.num_threads)
    scorer = Scorer(
        load_causal_lm(settings.model, device=settings.device),
        temperature=settings.temperature,
        micro_batch_tokens=settings.micro_batch_tokens,
        autocast=getattr(torch, settings.autocast),
    )
    worker = Worker(scorer, SnapshotStore(Path(settings.snapshots)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings.bind)
        print(json.dumps({"endpoint": socket.getsockopt_string(zmq.LAST_ENDPOINT), "pid": os.getpid()}), flush=True)
        os.dup2(2, 1)  # the parent reads one line and no more
        serve(worker, socket, token=token, parent_pid=settings.parent_pid or os.getppid())


def _warn(text: str) -> None:
    print(f"headway worker: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
