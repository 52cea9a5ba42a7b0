"""A local teacher as a process: `python -m headway.teacher.server`, one thread, one zmq ROUTER socket.

Consumes: requests of clients. Produces: one answer each. Waits for: a message, at most 0.1 s. All that waits is scored
together: the longer the queue, the larger the batch. Shutdown: STOP, or the death of the parent.
"""

import os
import time

import msgspec
import torch

from headway.models.loading import load_causal_lm
from headway.processes.router import (
    Router,
    announce,
    bound_router,
    end_with_parent,
    token_from_environment,
    warn_as,
)
from headway.teacher.messages import Score, Scored, TeacherSettings
from headway.teacher.scorer import Scorer

IDLE_MS = 100

MOST_REQUESTS = 64
"""In one round, so that the first answers do not wait for the last."""


class TeacherServer:
    """Serves one scorer on one socket."""

    def __init__(self, scorer: Scorer, router: Router) -> None:
        self._scorer, self._router = scorer, router
        self._waiting: list[tuple[bytes, Score]] = []
        self._busy_s = 0.0
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the round in hand."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            if self._router.poll(0 if self._waiting else IDLE_MS):
                for client, request in self._router.messages():
                    self._admit(client, request)
            round_, self._waiting = self._waiting[:MOST_REQUESTS], self._waiting[MOST_REQUESTS:]
            if round_:
                self._answer(round_)

    def _admit(self, client: bytes, request: Score) -> None:
        if (reason := self._scorer.refusal(request)) is not None:
            self._router.send(client, Scored(request.id, refused=reason, busy_s=self._busy_s))
        else:
            self._waiting.append((client, request))

    def _answer(self, round_: list[tuple[bytes, Score]]) -> None:
        begun = time.monotonic()
        answers = self._scorer.score([request for _, request in round_])
        self._busy_s += time.monotonic() - begun
        for (client, request), scores in zip(round_, answers, strict=True):
            self._router.send(client, Scored(request.id, scores, busy_s=self._busy_s))


def main() -> None:
    """Load the model named in HEADWAY_TEACHER, print `{"endpoint": …, "pid": …}` and serve."""
    end_with_parent()
    settings = msgspec.json.decode(os.environ["HEADWAY_TEACHER"], type=TeacherSettings)
    token = token_from_environment()
    torch.set_num_threads(settings.num_threads)
    dtype = getattr(torch, settings.dtype)
    scorer = Scorer(
        load_causal_lm(settings.model, device=settings.device, dtype=dtype),
        student_vocab_size=settings.student_vocab_size,
        temperature=settings.temperature,
        batch_tokens=settings.batch_tokens,
        autocast=dtype,
    )
    with bound_router() as socket:
        router = Router(socket, token=token, kind=Score, refusal=Scored(refused="wrong token"), warn=warn_as("teacher"))
        server = TeacherServer(scorer, router)
        announce(socket, server.stop)
        server.run()


if __name__ == "__main__":
    main()
