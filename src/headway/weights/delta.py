"""Weights as differences: each version is a file that turns the one before it into the new one, bit for bit.

    8 bytes: magic │ 8 bytes: length of the header │ header: msgpack │ payloads, end to end

The header names the version it starts from, and a digest of all bytes that must come out. An engine that does not hold
that version, or finds another digest, refuses with DeliveryFailed and is given the whole version instead (`deliver`).
"""

import asyncio
import struct
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from headway.protocols import DeliveryFailed, Engine
from headway.types import WeightRef
from headway.weights.differences import Encoding, apply, encode, words
from headway.weights.disk import DiskChannel, write_whole
from headway.weights.layout import Layout, refused, served
from headway.wire import decode
from headway.wire import encode as to_bytes

SUFFIX = ".delta"
_MAGIC = b"HWDELTA1"
_LENGTH = struct.Struct("<Q")


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The difference of one tensor; tensors without one did not change."""

    name: str
    encoding: Encoding
    num_changed: int
    num_bytes: int


class Header(msgspec.Struct, frozen=True):
    """What a delta file says of itself."""

    version: int
    base: int
    digest: str
    """Of the version that comes out; see `digest_of`."""
    pieces: list[Piece]


class DeltaChannel:
    """Publishes differences from version to version in `directory`, and a whole version when one is asked for.

    `dtype`: what floating-point tensors are rounded to before anything else, which must be what engines serve: at small
    learning rates most bfloat16 words do not change at all. None leaves them as they are. Keeps one copy of the last
    version on the host. `say` is told of every whole version that an engine had to be given.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype | None, say: Callable[[str], None]) -> None:
        self._directory, self._dtype, self._say = directory, dtype, say
        self._whole = DiskChannel(directory)
        self._held: dict[str, Tensor] = {}
        self._version = -1
        self._whole_ref: WeightRef | None = None
        self._deltas: dict[int, Path] = {}
        self._wholes: list[int] = []
        """Whole versions that an engine may be reading."""
        self._num_reading = 0
        # Engines ask for whole versions while the learner's thread publishes.
        self._lock = threading.Lock()
        for stale in directory.glob(f"*{SUFFIX}*"):
            stale.unlink()

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Write the difference to the version before (the first version whole), atomically.

        A difference to a version `in_use` stays: an engine may be reading it.
        Raises ValueError when `version` does not grow or the layout changed, OSError when the disk is full; the
        previous version then stays.
        """
        with self._lock:
            if version <= self._version:
                raise ValueError(f"version {version} published after version {self._version}")
            new = {name: served(tensor, self._dtype).cpu() for name, tensor in tensors.items()}
            if not self._held:
                self._held = {name: tensor.clone() for name, tensor in new.items()}
                self._version = version
                return self._write_whole()
            _require_same_layout(self._held, new)
            ref = self._write_delta(version, new, in_use)
            for name, tensor in new.items():
                self._held[name].copy_(tensor)
            self._version = version
            return ref

    def whole(self) -> WeightRef:
        """The last published version as one file; written when first asked for."""
        with self._lock:
            if self._whole_ref is None or self._whole_ref.version != self._version:
                return self._write_whole()
            return self._whole_ref

    async def deliver(self, ref: WeightRef, engine: Engine) -> int:
        """The version that the engine then holds: `ref`'s, or a newer one where the difference was of no use to it."""
        try:
            await engine.update_weights(ref)
            return ref.version
        except DeliveryFailed as error:
            # Counted before there is a file: whatever is published from here on takes none away.
            self._num_reading += 1
            try:
                whole = await asyncio.to_thread(self.whole)
                self._say(f"{error}; sending version {whole.version} whole")
                await engine.update_weights(whole)
            finally:
                self._num_reading -= 1
            return whole.version

    def close(self) -> None:
        """The last files stay on disk."""
        self._whole.close()

    def _write_whole(self) -> WeightRef:
        self._wholes = [*(self._wholes if self._num_reading else ()), self._version]
        self._whole_ref = self._whole.publish(self._version, self._held, self._wholes)
        return self._whole_ref

    def _write_delta(self, version: int, new: Mapping[str, Tensor], in_use: Collection[int]) -> WeightRef:
        pieces: list[Piece] = []
        payloads: list[bytes] = []
        for name in sorted(new):
            encoding, num_changed, payload = encode(words(self._held[name]), words(new[name]))
            if num_changed:
                pieces.append(Piece(name, encoding, num_changed, len(payload)))
                payloads.append(payload)
        header = to_bytes(Header(version, self._version, digest_of(new), pieces))
        path = self._directory / f"v{version}-from-v{self._version}{SUFFIX}"
        checksum = write_whole(path, [_MAGIC, _LENGTH.pack(len(header)), header, *payloads])
        self._deltas[version] = path
        for stale in self._deltas.keys() - {*sorted(self._deltas)[-2:], *in_use}:
            self._deltas.pop(stale).unlink(missing_ok=True)
        return WeightRef(version, str(path), checksum)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-64 of all tensors' bytes, in the order of their names; hexadecimal."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(words(tensors[name]).data)
    return digest.hexdigest()


def apply_delta(ref: WeightRef, held_version: int, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The version that a delta file makes of the one held; unchanged tensors are shared, the others are new.

    Raises DeliveryFailed, naming the file and what is wrong with it or with what is held.
    """
    try:
        data = Path(ref.path).read_bytes()
    except OSError as error:
        raise refused(ref, f"it cannot be read: {error.strerror}", DeliveryFailed) from error
    found = xxhash.xxh3_64_hexdigest(data)
    if found != ref.checksum:
        raise refused(ref, f"its checksum is {found}, not {ref.checksum}", DeliveryFailed)
    try:
        header, start = _parse(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise refused(ref, f"its header is damaged ({error})", DeliveryFailed) from error
    if header.version != ref.version:
        raise refused(ref, f"it holds version {header.version}", DeliveryFailed)
    if header.base != held_version:
        holds = f"version {held_version}" if held else "nothing"
        raise refused(ref, f"it starts from version {header.base}, and this engine holds {holds}", DeliveryFailed)
    try:
        new = dict(held) | _apply_all(header, memoryview(data)[start:], held)
    except (ValueError, KeyError) as error:
        raise refused(ref, f"it does not fit what this engine holds ({error})", DeliveryFailed) from error
    if (found := digest_of(new)) != header.digest:
        raise refused(ref, f"it makes weights of digest {found}, not {header.digest}", DeliveryFailed)
    return new


def _parse(data: bytes) -> tuple[Header, int]:
    start = len(_MAGIC) + _LENGTH.size
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        raise ValueError("it is no delta file")
    end = start + _LENGTH.unpack(data[len(_MAGIC) : start])[0]
    return decode(data[start:end], Header), end


def _apply_all(header: Header, payloads: memoryview, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    at = 0
    for piece in header.pieces:
        old = held[piece.name]
        payload = payloads[at : at + piece.num_bytes]
        at += piece.num_bytes
        new = apply(words(old), piece.encoding, piece.num_changed, payload)
        changed[piece.name] = torch.from_numpy(new).view(old.dtype).view(old.shape)
    return changed


def _require_same_layout(held: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    if change := Layout.of(held).difference(Layout.of(new)):
        raise ValueError(f"the weights changed their layout after the first publish: {change}")
