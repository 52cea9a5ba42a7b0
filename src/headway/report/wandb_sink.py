"""Weights & Biases, offline unless the environment says otherwise: `wandb sync RUN/wandb/offline-run-*`."""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import wandb


class WandbSink:
    """One W&B run a run folder: a resumed process continues under the same id.

    `WANDB_MODE=online` sends at once; without it nothing leaves the machine.
    """

    def __init__(self, run: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        self._run = wandb.init(
            project=project,
            name=run.resolve().name,
            # The folder's place tells runs of one name apart, and stays the same when a run is resumed.
            id=sha256(str(run.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step may only grow, but an evaluation is of a version that training has left behind.
        self._run.define_metric("*", step_metric="step")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()
