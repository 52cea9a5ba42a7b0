"""trackio, on this machine: `trackio show --project PROJECT`. Its database lies where `TRACKIO_DIR` says."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import trackio


class TrackioSink:
    """One trackio run a run folder: a resumed process continues it."""

    def __init__(self, run: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        # The database is shared, so the folder's place tells runs of one name apart.
        place = sha256(str(run.resolve()).encode()).hexdigest()[:6]
        self._run = trackio.init(
            project,
            name=f"{run.resolve().name}-{place}",
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
