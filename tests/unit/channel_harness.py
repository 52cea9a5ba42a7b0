"""Every weight channel behind one face, for the tests that all of them must pass."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.protocols import WeightChannel, WeightsRefused
from headway.types import WeightRef
from headway.weights import CollectiveChannel, DeltaChannel, DiskChannel, MemoryChannel, WeightReader

KINDS = ("memory", "disk", "delta", "collective")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """All the shapes and dtypes that models use, and one tensor that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "half": torch.randn(3, generator=generator).to(torch.float16),
        "scale": torch.tensor(1.5 + seed),
        "nothing": torch.empty(0, 4),
        "counts": torch.arange(3) + seed,
        "flag": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "frozen": torch.ones(3),
    }


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and torch.equal(left[k], right[k])
        for k in left
    )


@dataclass(eq=False)
class Reading:
    """An engine that does nothing but read what it is given."""

    version: int = -1
    held: Mapping[str, Tensor] = field(default_factory=dict)
    reader: WeightReader = field(default_factory=WeightReader)

    async def status(self) -> None:
        """It is there."""

    async def update_weights(self, ref: WeightRef) -> None:
        held = await asyncio.to_thread(self.reader.read, ref)
        # A copy: the channel may write over what is only lent.
        self.version, self.held = ref.version, {name: t.clone() for name, t in held.items()}


@dataclass
class Harness:
    """A channel and one engine at its end."""

    channel: WeightChannel
    engine: Any = field(default_factory=Reading)

    def deliver(self, ref: WeightRef) -> int:
        """Through the channel, as a run does."""
        return asyncio.run(self.channel.deliver(ref, self.engine))

    def refusal(self, ref: WeightRef) -> str:
        """What the engine says of a version that it must refuse."""
        try:
            asyncio.run(self.engine.update_weights(ref))
        except WeightsRefused as error:
            return str(error)
        raise AssertionError("the version was not refused")

    def damage(self, ref: WeightRef, place: float = 0.9, bit: int = 0) -> None:
        """Flip one bit of what was published."""
        path = Path(ref.path)
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        with path.open("r+b") as file:  # in place: a reader may have it mapped
            file.write(data)

    def cut(self, ref: WeightRef) -> None:
        """Leave half of what was published."""
        path = Path(ref.path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@dataclass
class Broadcasts(Harness):
    """References of this channel say who is meant to meet; a test has to take part."""

    def refusal(self, ref: WeightRef) -> str:
        assert isinstance(self.channel, CollectiveChannel) and self.channel._published
        published = self.channel._published
        self.channel._published = ref, published[1]
        try:
            self.deliver(ref)
        except WeightsRefused as error:
            return str(error)
        finally:
            self.channel._published = published
        raise AssertionError("the version was not refused")

    def damage(self, ref: WeightRef, place: float = 0.9, bit: int = 0) -> None:
        assert isinstance(self.channel, CollectiveChannel) and self.channel._published
        image = self.channel._published[1]
        image[int(place * len(image))] ^= 1 << bit

    def cut(self, ref: WeightRef) -> None:
        assert isinstance(self.channel, CollectiveChannel) and self.channel._published
        image = self.channel._published[1]
        self.channel._published = ref, image[: len(image) // 2]


def make(kind: str, place: Path, said: list[str]) -> Harness:
    match kind:
        case "memory":
            return Harness(MemoryChannel(place))
        case "disk":
            return Harness(DiskChannel(place))
        case "collective":
            return Broadcasts(CollectiveChannel(dtype=None, timeout_s=20, say=said.append))
        case _:
            return Harness(DeltaChannel(place, dtype=None, say=said.append))
