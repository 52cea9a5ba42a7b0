"""Metrics in other places, beside metrics.jsonl: TensorBoard, Weights & Biases, trackio.

A sink is a convenience and metrics.jsonl the record, so that no sink can harm a run: they are served by a thread of
their own, one that raises is reported once and left out from then on, and a queue that is full loses records, which is
said once too. Each step goes to them once: a step that is trained again after a kill is not sent again, and what a
kill took out of a sink's own buffers is missing there.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from headway.errors import HeadwayError

Record = Mapping[str, Any]

MAX_WAITING = 10_000
"""Records that may wait for slow sinks."""

CLOSE_S = 60.0
"""How long the end of a run waits for sinks to take what is left."""


class Sink(Protocol):
    """One place for metrics. Both methods are called from one thread, `close` last."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one optimizer step, or of one evaluation of the version that `step` steps made."""
        ...

    def close(self) -> None: ...


class SinkMissing(HeadwayError, ImportError):
    """A sink was named whose package is not installed."""


def _tensorboard(run: Path, project: str, settings: Mapping[str, Any]) -> Sink:
    from headway.report.tensorboard_sink import TensorBoardSink

    return TensorBoardSink(run)


def _wandb(run: Path, project: str, settings: Mapping[str, Any]) -> Sink:
    from headway.report.wandb_sink import WandbSink

    return WandbSink(run, project=project, settings=settings)


def _trackio(run: Path, project: str, settings: Mapping[str, Any]) -> Sink:
    from headway.report.trackio_sink import TrackioSink

    return TrackioSink(run, project=project, settings=settings)


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
"""Name of a sink, of its package and of its extra to what opens it."""


def require_sinks(names: Sequence[str]) -> None:
    """Raises SinkMissing with the command that installs what is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise SinkMissing(f"report.sinks needs {' and '.join(missing)}: pip install 'headway[{','.join(missing)}]'")


def sinks_of(
    names: Sequence[str], run: Path, *, project: str, settings: Mapping[str, Any]
) -> dict[str, Callable[[], Sink]]:
    """Name to what opens the sink, for `Sinks`."""
    return {name: partial(SINKS[name], run, project, settings) for name in names}


def numbers_of(record: Record) -> dict[str, float]:
    """What a sink is given of a record: its numbers, under `train/` or the split of an evaluation.

    >>> numbers_of({"kind": "evaluation", "split": "test", "policy_version": 3, "accuracy": 0.5})
    {'test/accuracy': 0.5}
    """
    where = record["split"] if record["kind"] == "evaluation" else "train"
    return {
        f"{where}/{name}": float(value)
        for name, value in record.items()
        if name not in ("step", "policy_version") and isinstance(value, int | float) and not isinstance(value, bool)
    }


class Sinks:
    """Hands records to sinks in a thread of its own; `log` never waits and never raises.

    `first_step`: steps before it were sent by an earlier process.
    """

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]], *, first_step: int, say: Callable[[str], None]) -> None:
        self._next_step = first_step
        self._say = say
        self._waiting: Queue[Record | None] = Queue(MAX_WAITING)
        self._lost = False
        self._thread: threading.Thread | None = None
        if sinks:
            # A daemon, so that a sink that hangs cannot keep the process alive.
            self._thread = threading.Thread(target=self._serve, args=(dict(sinks),), daemon=True, name="sinks")
            self._thread.start()

    def log(self, record: Record) -> None:
        if self._thread is None:
            return
        if record["kind"] == "step":
            if record["step"] < self._next_step:
                return
            self._next_step = record["step"] + 1
        try:
            self._waiting.put_nowait(record)
        except Full:
            if not self._lost:
                self._say("the sinks do not keep up: some records will be missing there; metrics.jsonl has them all")
            self._lost = True

    def close(self) -> None:
        """Wait, but not forever, until the sinks have everything."""
        if self._thread is None:
            return
        with suppress(Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say(f"the sinks did not finish within {CLOSE_S:.0f} s; metrics.jsonl has everything")

    def _serve(self, openers: dict[str, Callable[[], Sink]]) -> None:
        """Consumes records until None. A sink that raises anywhere is out from then on."""
        sinks: dict[str, Sink] = {}
        for name, opener in openers.items():
            self._guarded(name, sinks, lambda name=name, opener=opener: sinks.__setitem__(name, opener()))
        while (record := self._waiting.get()) is not None:
            step = record["step"] if record["kind"] == "step" else record["policy_version"]
            numbers = numbers_of(record)
            for name, sink in list(sinks.items()):
                self._guarded(name, sinks, partial(sink.log, numbers, step))
        for name, sink in list(sinks.items()):
            self._guarded(name, sinks, sink.close)

    def _guarded(self, name: str, sinks: dict[str, Sink], call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a foreign package raises must not end the thread
            sinks.pop(name, None)
            self._say(
                f"sink {name} failed and is left out from here: {type(error).__name__}: {error}; metrics.jsonl goes on"
            )
