"""Weights through a file system that learner and engines share."""

import os
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from headway.protocols import Engine
from headway.types import WeightRef
from headway.weights.layout import Layout


class DiskChannel:
    """One safetensors file a version in `directory`, which is its own; the last two, and those in use, are kept.

    A version appears whole or not at all: it is written beside its place, synced, then renamed. Values are not
    looked at: a non-finite parameter shows in the gradient norm a step earlier and at less cost.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._previous: Path | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Write all tensors atomically. Raises OSError when the disk is full; the previous version stays."""
        path = self._path(version)
        layout = Layout.of(tensors)
        parts = chain([layout.header(version, "complete")], map(_raw, map(tensors.__getitem__, layout.slots)))
        checksum = write_whole(path, parts)
        self._keep(path, self._previous, *map(self._path, in_use))
        self._previous = path
        return WeightRef(version, str(path), checksum)

    async def deliver(self, ref: WeightRef, engine: Engine) -> int:
        """Have the engine map the file."""
        await engine.update_weights(ref)
        return ref.version

    def close(self) -> None:
        """The last two versions stay on disk."""

    def _path(self, version: int) -> Path:
        return self._directory / f"v{version}.safetensors"

    def _keep(self, *paths: Path | None) -> None:
        # What a killed run left behind goes too.
        for found in self._directory.glob("v[0-9]*.safetensors*"):
            if found not in paths:
                found.unlink()


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file that appears whole or not at all; the xxh3-64 of its bytes, hexadecimal. Raises OSError."""
    draft = path.with_name(path.name + ".tmp")
    digest = xxhash.xxh3_64()
    with open(draft, "wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
