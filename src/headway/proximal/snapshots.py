"""Published parameters of the staleness window, as files that are mapped, not copied, when they are read.

One file serves every reader (learner and worker alike) through the page cache, survives kill -9, and costs no
memory that the system cannot take back. After a step of AdamW every tensor has changed, so there is nothing to share
between versions; docs/old-logits.md has what an exact difference would save.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import HeadwayError


class SnapshotGone(HeadwayError, RuntimeError):
    """The parameters of a version that is still needed are missing or damaged."""


class SnapshotStore:
    """`directory/version-000012.safetensors` for each version kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        for partial in directory.glob("*.partial"):
            partial.unlink()

    def keep(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Write a version that is not there yet; it appears whole or not at all, whenever the process is killed."""
        target = self._path(version)
        if target.exists():
            return  # tokens were sampled with these bits; a redone step makes them again
        partial = target.with_suffix(".partial")
        save_file({name: t.detach().contiguous() for name, t in parameters.items()}, partial)
        partial.rename(target)

    def forget_before(self, version: int) -> None:
        """Delete versions that no token in flight can carry any more."""
        for old in self.versions():
            if old < version:
                self._path(old).unlink()

    def versions(self) -> list[int]:
        """Those kept, ascending."""
        names = (re.fullmatch(r"version-(\d+)\.safetensors", entry.name) for entry in self._directory.iterdir())
        return sorted(int(name[1]) for name in names if name)

    @property
    def num_bytes(self) -> int:
        """Of all versions kept."""
        return sum(self._path(version).stat().st_size for version in self.versions())

    def read(self, version: int) -> dict[str, Tensor]:
        """The parameters of a version, mapped. Raises SnapshotGone."""
        path = self._path(version)
        try:
            return load_file(path)
        except (FileNotFoundError, SafetensorError) as error:
            raise SnapshotGone(f"{path}: the parameters of version {version} are needed but {error}") from error

    def _path(self, version: int) -> Path:
        return self._directory / f"version-{version:06d}.safetensors"
