"""Weights through memory that learner and engines share: mapped files, written in turn."""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from headway.protocols import Engine
from headway.types import WeightRef
from headway.weights.layout import Layout, Slot, release_mappings

_PREFIX = "headway-weights-"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class _Buffer:
    """One of the files, mapped."""

    path: Path
    memory: mmap.mmap
    flat: Tensor
    """The same bytes as a uint8 tensor."""
    version: int = -1
    """What it holds; −1 while it is not whole."""


class MemoryChannel:
    """Publishes by one copy into preallocated shared memory; reading maps the same pages.

    Two buffers serve engines that keep up; while one lags, what it uses stays, and another buffer is added.
    `directory`: where to make the channel's private folder; None takes /dev/shm if both buffers fit, else the
    temporary directory. Folders of dead processes are removed from there. Values are not looked at: a pass over
    them would cost half as much as publishing, and a non-finite parameter shows in the gradient norm first.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._bases = [directory] if directory else [_SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._folder: Path | None = None
        self._lock = -1
        self._layout: Layout | None = None
        self._buffers: list[_Buffer] = []
        self._version = -1
        for base in self._bases:
            _remove_orphans(base)

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Copy all tensors into a buffer that nobody uses. The previous version stays, even when this fails.

        Raises ValueError when `version` does not grow, or when a name, shape or dtype changed since the first
        publish; OSError when the copies of the weights do not fit.
        """
        if version <= self._version:
            raise ValueError(f"version {version} published after version {self._version}")
        layout = Layout.of(tensors)
        if self._layout is None:
            self._allocate(layout)
            self._layout = layout
        elif change := self._layout.difference(layout):
            raise ValueError(f"the weights changed their layout after the first publish: {change}")
        kept = {self._version, *in_use} - {-1}
        buffer = next((b for b in self._buffers if b.version not in kept), None) or self._add_buffer(layout.size)
        buffer.version = -1
        checksum = _write(buffer, layout, version, tensors)
        buffer.version = self._version = version
        return WeightRef(version, str(buffer.path), checksum)

    async def deliver(self, ref: WeightRef, engine: Engine) -> int:
        """Have the engine map the file."""
        await engine.update_weights(ref)
        return ref.version

    def close(self) -> None:
        """Remove the files. Processes that still map them keep their memory until they let go."""
        self._buffers.clear()
        release_mappings()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    def _allocate(self, layout: Layout) -> None:
        fitting = [base for base in self._bases if base.is_dir() and _free_bytes(base) > 2 * layout.size]
        if not fitting:
            places = " or ".join(map(str, self._bases))
            raise OSError(errno.ENOSPC, f"two copies of the weights ({2 * layout.size:,} bytes) do not fit in {places}")
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=fitting[0]))
        # The kernel frees the lock when this process ends in whatever way: the sign that the folder is an orphan.
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            for _ in range(2):
                self._add_buffer(layout.size)
        except OSError:
            self.close()
            raise

    def _add_buffer(self, size: int) -> _Buffer:
        assert self._folder is not None
        buffer = _map_new(self._folder / f"{len(self._buffers)}.safetensors", size)
        self._buffers.append(buffer)
        return buffer


def _write(buffer: _Buffer, layout: Layout, version: int, tensors: Mapping[str, Tensor]) -> str:
    """Fill the buffer; the checksum of its bytes. It says `writing` until it is whole."""
    complete = layout.header(version, "complete")
    buffer.memory[: layout.header_size] = layout.header(version, "writing")
    whole = memoryview(buffer.memory)
    digest = xxhash.xxh3_64(complete)
    # xxhash and memmove both release the interpreter lock, so one tensor is hashed while the next is copied.
    with ThreadPoolExecutor(1) as hasher:
        jobs = []
        for name, slot in layout.slots.items():
            _copy(buffer, slot, tensors[name].detach())
            jobs.append(hasher.submit(digest.update, whole[slot.start : slot.end]))
    for job in jobs:
        job.result()
    buffer.memory[: layout.header_size] = complete
    return digest.hexdigest()


def _copy(buffer: _Buffer, slot: Slot, tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # Past the cache, memmove takes two thirds of the time of Tensor.copy_.
        ctypes.memmove(buffer.flat.data_ptr() + slot.start, tensor.data_ptr(), tensor.nbytes)
    else:
        buffer.flat[slot.start : slot.end].view(slot.dtype).view(slot.shape).copy_(tensor)


def _map_new(path: Path, size: int) -> _Buffer:
    with open(path, "xb+") as file:
        # Reserve the pages now: a full file system must be an error here, not a SIGBUS while copying.
        os.posix_fallocate(file.fileno(), 0, size)
        memory = mmap.mmap(file.fileno(), size)
    return _Buffer(path, memory, torch.frombuffer(memory, dtype=torch.uint8))


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _remove_orphans(base: Path) -> None:
    """Remove this user's channel folders whose process is gone."""
    for lock in base.glob(f"{_PREFIX}*/lock"):
        # Locked: its process lives. Not found: another process is removing it.
        with suppress(BlockingIOError, FileNotFoundError):
            if lock.stat().st_uid == os.getuid():
                with open(lock, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
