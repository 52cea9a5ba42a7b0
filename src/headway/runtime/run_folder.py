"""Where a run lives on disk, and who may write there."""

import fcntl
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash
from safetensors import SafetensorError

from headway.config import ConfigError, RunConfig, load_config, with_head
from headway.errors import HeadwayError
from headway.runtime.identity import identity, objection_to


class RunFolderError(HeadwayError, RuntimeError):
    """The folder is not what the command needs; the message says what is."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run: `config.toml`, `metrics.jsonl`, `ledger.sqlite`, `checkpoints/`, `batches/`, `logs/`."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> "RunFolder":
        """A new folder with its resolved config. Raises RunFolderError if a run lives there, or none can."""
        cls.require_free(path)
        folder = cls(path.absolute())  # processes elsewhere have another working directory
        try:
            for directory in (folder.checkpoints, folder.logs):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{path} cannot hold a run: {error}; give --run another place") from error
        write_atomically(folder.identity_path, json.dumps(identity(config)))
        write_atomically(folder.config_path, config.to_toml())
        return folder

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Raises RunFolderError if a run already lives there."""
        folder = cls(path)
        if os.path.exists(folder.config_path):  # false too where no name can be that long
            raise RunFolderError(f"{path} already holds a run; `headway resume {shlex.quote(str(path))}` continues it")
        has_checkpoints = os.path.isdir(folder.checkpoints) and folder.checkpoint_versions()
        if has_checkpoints or os.path.exists(folder.ledger_path):  # a new run would take them for its own
            raise RunFolderError(f"{path} holds a run without its config.toml; restore it, or give --run another place")

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", RunConfig]:
        """An existing run and its config. Raises RunFolderError."""
        folder = cls(path.absolute())
        if not folder.config_path.is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no config.toml")
        config = load_config(folder.config_path)
        if objection := objection_to(config, _stored(folder.identity_path, "max_staleness", int)):
            raise RunFolderError(objection)
        if config.learner.head == "auto" and folder.head_path.is_file():
            config = _with_stored_head(config, folder.head_path)
        return folder, config

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.json"

    @property
    def head_path(self) -> Path:
        """What `learner.head = "auto"` came to."""
        return self.path / "head.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.jsonl"

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
    def snapshots(self) -> Path:
        """Parameters of versions that tokens in flight carry."""
        return self.path / "snapshots"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def lock(self) -> IO[str]:
        """Hold the folder for writing until the returned file is closed or this process dies.

        Raises RunFolderError naming the process that holds it, or why it cannot be written.
        """
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise RunFolderError(f"{self.path} is in use by process {holder}; stop it first") from None
        try:
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        except OSError as error:
            file.close()
            raise RunFolderError(f"cannot write {file.name}: {error}; make room there and `headway resume`") from error
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
        try:
            save(partial)
            write_atomically(partial / _CHECKSUMS, json.dumps(_checksums(partial)))
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"cannot write {target}: {error}; make room there and `headway resume`") from error
        for file in [*partial.rglob("*"), partial]:
            _sync(file)
        partial.rename(target)
        _sync(self.checkpoints)
        return target

    def verify_checkpoint(self, policy_version: int) -> Path:
        """The checkpoint's directory, if every file is what was saved. Raises RunFolderError with the mend."""
        directory = self.checkpoint(policy_version)
        try:
            saved = msgspec.json.decode((directory / _CHECKSUMS).read_bytes(), type=dict[str, str])
            damaged = sorted(name for name, digest in _checksums(directory).items() if saved.get(name) != digest)
            damaged += sorted(set(saved) - {file.name for file in directory.iterdir()})
        except (OSError, ValueError, RecursionError):
            damaged = [_CHECKSUMS]
        if damaged:
            raise RunFolderError(
                f"{directory} is damaged ({', '.join(damaged)}); delete it and resume: "
                "the checkpoint before it and the ledger continue the run"
            )
        return directory

    def sweep(self) -> None:
        """Delete what a kill left half written."""
        for partial in self.checkpoints.glob("partial-*"):
            shutil.rmtree(partial)

    def prune_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep`, and version 0, from which a recorded run replays."""
        for version in self.checkpoint_versions()[:-keep]:
            if version:
                target = self.checkpoint(version)
                # Renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name.
                doomed = target.rename(target.with_name(f"partial-{target.name}"))
                shutil.rmtree(doomed)


_CHECKSUMS = "checksums.json"


def _stored(path: Path, key: str, kind: type) -> dict[str, Any]:
    """What an earlier process noted, a JSON object with `key`. Raises RunFolderError when it is damaged."""
    try:
        facts = json.loads(path.read_bytes())
        if isinstance(facts, dict) and isinstance(facts.get(key), kind):
            return facts
        reason = f"it lacks {key}"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise RunFolderError(f"{path} is damaged ({reason}); it says how the run was started: restore it")


def _with_stored_head(config: RunConfig, path: Path) -> RunConfig:
    head = _stored(path, "head", str)["head"]
    if head == "auto":
        raise RunFolderError(f'{path} names "auto", but is there to say what "auto" came to: restore it')
    try:
        return with_head(config, head)
    except ConfigError as error:
        raise ConfigError(f"{path} names no head: {error}") from error


def _checksums(directory: Path) -> dict[str, str]:
    """File name to xxh3-64 of every file but the checksums themselves."""
    digests = {}
    for file in directory.iterdir():
        if file.is_file() and file.name != _CHECKSUMS:
            digest = xxhash.xxh3_64()
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    digest.update(chunk)
            digests[file.name] = digest.hexdigest()
    return digests


def write_atomically(path: Path, text: str) -> None:
    """The file holds either what it held or all of `text`, whenever the process is killed. Raises OSError naming it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        _sync(partial)
        partial.replace(path)
    except OSError as error:  # of a full disk, Python names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
