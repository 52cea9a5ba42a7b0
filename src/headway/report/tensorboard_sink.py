"""TensorBoard: `tensorboard --logdir RUN/tensorboard`."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  made at run time
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """One event file a process under `RUN/tensorboard`."""

    def __init__(self, run: Path) -> None:
        self._writer = EventFileWriter(str(run / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()
