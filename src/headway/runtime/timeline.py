"""timeline.jsonl: who worked and who waited, span by span, for the report."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.types import EngineStatus

MIN_S = 0.001
"""Shorter spans are left out: nobody could see them."""

MAX_ENGINES = 32
"""Engines that get a row of their own; the report could not show more."""

_WAITS = {"learner": ("learner", "wait"), "run": ("learner", "wait"), "evaluation": ("evaluation", "evaluation")}
"""Who waits to the lane and the kind of the span; an evaluation is the engines' work. Other waits are not drawn."""


class Timeline:
    """Appends spans `{lane, what, start, end, …facts}`, seconds since the epoch; path None keeps nothing.

    Called from the event loop's thread only. A line a span, written as it ends, so that a reader may follow.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", buffering=1) if path is not None else None
        self._to_epoch = time.time() - time.monotonic()
        self._seen: dict[str, tuple[float, EngineStatus]] = {}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, lane: str, what: str, begun: float, ended: float | None = None, **facts: Any) -> None:
        """A span that is over; times as of `time.monotonic()`, `ended` None for now."""
        ended = time.monotonic() if ended is None else ended
        if self._file is not None and ended - begun >= MIN_S:
            times = {"start": round(begun + self._to_epoch, 4), "end": round(ended + self._to_epoch, 4)}
            self._file.write(json.dumps({"lane": lane, "what": what, **times, **facts}) + "\n")

    @contextmanager
    def span(self, lane: str, what: str, **facts: Any) -> Iterator[None]:
        """The time of the body, however it ends."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(lane, what, begun, **facts)

    def waited(self, who: str, knob: str, begun: float) -> None:
        """A wait that is over; see `Waits`."""
        if who in _WAITS:
            lane, what = _WAITS[who]
            facts: dict[str, Any] = {"knob": knob} if who == "learner" else {}
            self.add(lane, what, begun, **facts)

    def engines(self, statuses: Mapping[str, EngineStatus]) -> None:
        """How busy each engine was since the last call; one that was restarted was down until its clock began."""
        now = time.monotonic()
        for name, status in list(statuses.items())[:MAX_ENGINES]:
            then, last = self._seen.get(name, (now, status))
            if status.up_s > last.up_s:
                share = min(1.0, max(0.0, (status.busy_s - last.busy_s) / (status.up_s - last.up_s)))
                self.add(name, "decode", then, now, share=round(share, 3), active=status.num_active)
            elif status.up_s < last.up_s:
                self.add(name, "down", then, max(then, now - status.up_s))
            if name not in self._seen or status.up_s != last.up_s:
                self._seen[name] = now, status
