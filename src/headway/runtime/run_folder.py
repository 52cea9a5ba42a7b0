"""Where a run lives on disk, and who may write there."""

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headway.config import ConfigError, RunConfig, load_config
from headway.errors import HeadwayError


class RunFolderError(HeadwayError, RuntimeError):
    """The folder is not what the command needs; the message says what is."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run: `config.toml`, `metrics.jsonl`, `ledger.sqlite`, `checkpoints/`, `batches/`, `logs/`."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> "RunFolder":
        """A new folder with its resolved config. Raises RunFolderError if a run already lives there."""
        folder = cls(path)
        if folder.config_path.exists():
            raise RunFolderError(f"{path} already holds a run; `headway resume {path}` continues it")
        for directory in (folder.checkpoints, folder.logs):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.config_path, config.to_toml())
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", RunConfig]:
        """An existing run and its config. Raises RunFolderError."""
        folder = cls(path)
        if not folder.config_path.is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no config.toml")
        try:
            return folder, load_config(folder.config_path)
        except ConfigError as error:
            raise RunFolderError(f"{folder.config_path}: {error}") from error

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def lock(self) -> IO[str]:
        """Hold the folder for writing until the returned file is closed or this process dies.

        Raises RunFolderError naming the process that holds it.
        """
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise RunFolderError(f"{self.path} is in use by process {holder}; stop it first") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def checkpoint(self, policy_version: int) -> Path:
        """Where the checkpoint of a version lies: the parameters after `policy_version` optimizer steps."""
        return self.checkpoints / f"version-{policy_version:06d}"

    def checkpoint_versions(self) -> list[int]:
        """Versions with a whole checkpoint, oldest first."""
        names = (re.fullmatch(r"version-(\d+)", entry.name) for entry in self.checkpoints.glob("version-*"))
        return sorted(int(name[1]) for name in names if name)

    def save_checkpoint(self, policy_version: int, save: Callable[[Path], None]) -> Path:
        """Let `save(directory)` write a checkpoint; it appears under its name only when it is whole and on disk."""
        target = self.checkpoint(policy_version)
        if target.exists():
            return target
        partial = target.with_name(f"partial-{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save(partial)
        for file in [*partial.rglob("*"), partial]:
            _sync(file)
        partial.rename(target)
        _sync(self.checkpoints)
        return target

    def prune_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep`, and version 0, from which a recorded run replays."""
        for version in self.checkpoint_versions()[:-keep]:
            if version:
                target = self.checkpoint(version)
                # Renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name.
                doomed = target.rename(target.with_name(f"partial-{target.name}"))
                shutil.rmtree(doomed)


def write_atomically(path: Path, text: str) -> None:
    """The file holds either what it held or all of `text`, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    _sync(partial)
    partial.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
