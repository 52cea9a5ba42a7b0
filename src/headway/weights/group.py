"""A process group of the learner and some engines, apart from the process's own default group."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed
from torch import Tensor

from headway.protocols import DeliveryFailed
from headway.types import WeightRef
from headway.weights.layout import Layout, refused, verified_slots

dist: Any = torch.distributed
"""Stores and groups apart from the default one are public there, but the stubs do not know them."""

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as whom a process joins a group, and how many bytes are broadcast there.

    Example: `Meeting("gloo", "127.0.0.1", 40123, "3fa2…", rank=1, world=3, size=1_642_496, timeout_s=60.0)`
    """

    backend: str
    host: str
    port: int
    key: str
    """Known to those invited only; another key is another group."""
    rank: int
    world: int
    size: int
    timeout_s: float

    @property
    def url(self) -> str:
        """All of it, as the path of a WeightRef."""
        return (
            f"{self.backend}://{self.host}:{self.port}/{self.key}"
            f"?rank={self.rank}&world={self.world}&size={self.size}&timeout_s={self.timeout_s:g}"
        )

    @classmethod
    def parse(cls, url: str) -> "Meeting":
        """Inverse of `url`. Raises ValueError, KeyError."""
        parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
        if parts.scheme not in BACKENDS or parts.hostname is None or parts.port is None:
            raise ValueError(f"{url!r} names no meeting of {' or '.join(BACKENDS)}")
        rank, world, size = (int(query[name][0]) for name in ("rank", "world", "size"))
        if not 0 < rank < world or size < 0:
            raise ValueError(f"rank {rank} of {world} with {size} bytes makes no sense")
        timeout_s = float(query["timeout_s"][0])
        return cls(parts.scheme, parts.hostname, parts.port, parts.path.strip("/"), rank, world, size, timeout_s)


def is_meeting(ref: WeightRef) -> bool:
    """Whether a version comes by a broadcast, not from a file."""
    return "://" in ref.path


def parsed_meeting(ref: WeightRef) -> Meeting:
    """Where a version is broadcast. Raises WeightsRefused."""
    try:
        return Meeting.parse(ref.path)
    except (ValueError, KeyError) as error:
        raise refused(ref, f"it is no meeting of a group ({error})") from error


def listen(host: str, timeout_s: float) -> tuple[Any, int]:
    """A store at `host` alone, where ranks find each other, and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself it would listen on every interface
    )
    return store, port


def call(host: str, port: int, timeout_s: float) -> Any:
    """The store that another process listens with."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def form(store: Any, meeting: Meeting) -> Any:
    """Join the group; blocks until all ranks have. Raises RuntimeError when one does not within the timeout."""
    own = dist.PrefixStore(meeting.key, store)
    timeout = timedelta(seconds=meeting.timeout_s)
    if meeting.backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a lost rank ends this process, not the call
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, meeting.rank, meeting.world, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(meeting.host, meeting.port))]
    return dist.ProcessGroupGloo(own, meeting.rank, meeting.world, options)


def broadcast(group: Any, image: Tensor, meeting: Meeting) -> None:
    """Send (rank 0) or fill (the others) a flat buffer; blocks. Raises RuntimeError when a rank is lost or late."""
    group.broadcast(image, 0).wait(timedelta(seconds=meeting.timeout_s))
    if image.is_cuda:
        torch.cuda.synchronize(image.device)


class ImageSender:
    """Implements `headway.weights.collective.Sender` for the built-in engine: the image travels as it lies.

    All groups meet at one store.
    """

    width = 1

    def __init__(self, host: str, timeout_s: float) -> None:
        self._store, self._port = listen(host, timeout_s)
        self._group: Any = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """These engines look at what they are given themselves."""

    def meet(self) -> int:
        """The port where a new group is to meet."""
        self._group = None
        return self._port

    def send(self, image: Tensor, layout: Layout, meeting: Meeting) -> None:
        """Form the group if there is none, and send; blocks. Raises RuntimeError when a rank is lost or late."""
        try:
            self._group = self._group or form(self._store, meeting)
            broadcast(self._group, image, meeting)
        except RuntimeError:
            self._group = None
            raise

    def part(self) -> None:
        """Leave the group."""
        self._group = None


class Receiver:
    """An engine's rank: stays in its group until it is called to another one."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._store: Any = None
        self._group: Any = None
        self._key = ""

    def receive(self, ref: WeightRef) -> dict[str, Tensor]:
        """The tensors of a version, in memory of their own. Raises WeightsRefused, DeliveryFailed when it broke off."""
        meeting = parsed_meeting(ref)
        try:
            image = self._take_part(meeting)
        except RuntimeError as error:
            self._group = self._store = None
            raise refused(ref, f"the broadcast broke: {str(error).splitlines()[0]}", DeliveryFailed) from error
        slots = verified_slots(ref, memoryview(image.cpu().numpy().data))
        return {name: image[s.start : s.end].view(s.dtype).view(s.shape) for name, s in slots.items()}

    def _take_part(self, meeting: Meeting) -> Tensor:
        if self._group is None or self._key != meeting.key:
            self._group = None
            self._store = call(meeting.host, meeting.port, meeting.timeout_s)
            self._group, self._key = form(self._store, meeting), meeting.key
        device = self._device if meeting.backend == "nccl" else "cpu"
        image = torch.empty(meeting.size, dtype=torch.uint8, device=device)
        broadcast(self._group, image, meeting)
        return image


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another: loopback stays on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
