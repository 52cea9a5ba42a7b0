"""The teacher's stage of every episode: its waits, and the accounts that a step reports."""

import asyncio
import time
from dataclasses import dataclass

from headway.cache import CacheKind, bytes_per_token
from headway.protocols import Teacher
from headway.rollout.scoring import score_response
from headway.runtime.waits import Waits
from headway.types import Prompt, Response


@dataclass(slots=True)
class _Since:
    """Running totals at the last report."""

    at: float
    busy_s: float = 0.0
    num_scored: int = 0
    waited_s: float = 0.0


class TeacherStage:
    """Takes finished episodes to the teacher.

    Consumes: responses. Produces: responses with the teacher's log-probs. Waits for: the teacher. Unblocked by: its
    answer, or its restart. A response counts as generating until it is scored, so the staleness bound covers the wait.

    `num_top`: ids the teacher itself is to name. `width`: log-probs a position travels with. `vocab_size`: for the
    comparison with sending everything. `latency_s`: seconds that every answer is held back. `knob`: what makes the
    teacher faster.
    """

    def __init__(
        self,
        teacher: Teacher,
        *,
        kind: CacheKind,
        num_top: int,
        width: int,
        vocab_size: int,
        latency_s: float,
        knob: str,
        waits: Waits,
    ) -> None:
        self.teacher = teacher
        self._kind: CacheKind = kind
        self._num_top, self._width, self._latency_s = num_top, width, latency_s
        self._knob, self._waits = knob, waits
        self._bytes = bytes_per_token(kind, width), 4 * vocab_size
        self.num_waiting = 0
        self._now = _Since(time.monotonic())
        self._last = _Since(self._now.at)

    async def score(self, prompt: Prompt, response: Response) -> Response:
        """See `headway.rollout.scoring.score_response`."""
        begun = time.monotonic()
        self.num_waiting += 1
        try:
            with self._waits.wait("a response", self.teacher.describe, self._knob):
                await asyncio.sleep(self._latency_s)
                scored = await score_response(
                    prompt, response, teacher=self.teacher, kind=self._kind, num_top=self._num_top, width=self._width
                )
        finally:
            self.num_waiting -= 1
        self._now.num_scored += 1
        self._now.waited_s += time.monotonic() - begun
        return scored

    def describe(self) -> str:
        """What a waiting learner is told."""
        return f"{self.num_waiting} responses wait for {self.teacher.describe()}"

    def metrics(self) -> dict[str, float]:
        """Of the time since the last call; docs/metrics.md."""
        now, last = self._now, self._last
        now.at, now.busy_s = time.monotonic(), self.teacher.busy_s
        num_scored = now.num_scored - last.num_scored
        metrics = {
            "num_scoring": float(self.num_waiting),
            "teacher_wait_s": (now.waited_s - last.waited_s) / num_scored if num_scored else 0.0,
            "teacher_busy": min(1.0, max(0.0, now.busy_s - last.busy_s) / max(1e-9, now.at - last.at)),
            "teacher_retries": float(self.teacher.num_retries),
            "cache_bytes_per_token": float(self._bytes[0]),
            "vocabulary_bytes_per_token": float(self._bytes[1]),
        }
        self._last = _Since(now.at, now.busy_s, now.num_scored, now.waited_s)
        return metrics
