"""The old-logit worker: `python -m headway.proximal.server`, one thread, one zmq ROUTER socket.

Consumes: requests to score. Produces: one reply to each. Waits for: a message, at most 0.1 s. Unblocked by: any
message. Shutdown: STOP or the death of the parent. It keeps no state but mapped parameters, so a request that died
with it is simply sent to its successor.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.models.loading import load_causal_lm
from headway.processes.router import (
    Router,
    announce,
    bound_router,
    end_with_parent,
    token_from_environment,
    warn_as,
)
from headway.proximal.messages import Scored, ScoreRequest, WorkerSettings
from headway.proximal.scorer import Piece, Scorer
from headway.proximal.snapshots import SnapshotGone, SnapshotStore

IDLE_MS = 100

MAX_REQUEST_BYTES = 1 << 30
"""A whole batch of sequences may come at once."""


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
        try:
            pieces = [Piece(ids, wanted) for ids, wanted in zip(request.token_ids, request.wanted, strict=True)]
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


def serve(worker: Worker, router: Router) -> None:
    """Answer for ever."""
    while True:
        if router.poll(IDLE_MS):
            for client, request in router.messages():
                router.send(client, worker.answer(request))


def main() -> None:
    """Build the worker from HEADWAY_WORKER, print `{"endpoint": …, "pid": …}` and serve."""
    end_with_parent()
    settings = msgspec.json.decode(os.environ["HEADWAY_WORKER"], type=WorkerSettings)
    token = token_from_environment()
    torch.set_num_threads(settings.num_threads)
    scorer = Scorer(
        load_causal_lm(settings.model, device=settings.device),
        temperature=settings.temperature,
        micro_batch_tokens=settings.micro_batch_tokens,
        autocast=getattr(torch, settings.autocast),
    )
    worker = Worker(scorer, SnapshotStore(Path(settings.snapshots)))
    with bound_router(max_bytes=MAX_REQUEST_BYTES) as socket:
        refusal = Scored(-1, None, error="wrong token")
        router = Router(socket, token=token, kind=ScoreRequest, refusal=refusal, warn=warn_as("worker"))
        announce(socket, lambda: sys.exit(0))
        serve(worker, router)


if __name__ == "__main__":
    main()
