"""Weights through a file system that learner and engines share."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from headway.types import WeightRef
from headway.weights.layout import Layout


class DiskChannel:
    """One safetensors file a version in `directory`, which is the channel's own; the last two are kept.

    A version appears whole or not at all: it is written beside its place, synced, then renamed. Values are not
    looked at: a non-finite parameter shows in the gradient norm a step earlier and at less cost.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._previous: Path | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> WeightRef:
        """Write all tensors atomically. Raises OSError when the disk is full; the previous version stays."""
        path = self._directory / f"v{version}.safetensors"
        draft = path.with_suffix(".safetensors.tmp")
        layout = Layout.of(tensors)
        digest = xxhash.xxh3_64()
        with open(draft, "wb") as file:
            for part in (layout.header(version, "complete"), *map(_raw, map(tensors.__getitem__, layout.slots))):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._sync_directory()
        self._keep(path, self._previous)
        self._previous = path
        return WeightRef(version, str(path), digest.hexdigest())

    def close(self) -> None:
        """The last two versions stay on disk."""

    def _sync_directory(self) -> None:
        handle = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _keep(self, *paths: Path | None) -> None:
        # What a killed run left behind goes too.
        for found in self._directory.glob("v[0-9]*.safetensors*"):
            if found not in paths:
                found.unlink()


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
