"""Broadcasts to servers of other make: a group as torch's own code forms it, and one tensor after another.

A server (SGLang) joins by a `tcp://` rendezvous, a prefix of the group's name, and the helper behind torch's own
`new_group`; so does this end, for what that helper agrees on through the store is torch's own affair and changes
between its versions: both ends must run the same. What will be sent, and in which order, is announced in that store.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
import torch.distributed.distributed_c10d
from torch import Tensor

from headway.protocols import WeightsRefused
from headway.weights.group import Meeting, call, listen
from headway.weights.layout import Layout, Slot

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d
"""Private there, but the very functions that servers call."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Announced(msgspec.Struct, frozen=True):
    """One tensor of a broadcast. Example: `Announced("model.norm.weight", "bfloat16", (64,), 128)`"""

    name: str
    dtype: str
    """Torch's name of it."""
    shape: tuple[int, ...]
    num_bytes: int


def announced(meeting: Meeting) -> list[Announced]:
    """What will be sent at a meeting, in this order; blocks until it is known. Raises RuntimeError, DecodeError."""
    store = call(meeting.host, meeting.port, meeting.timeout_s)
    return msgspec.json.decode(store.get(_place(meeting)), type=list[Announced])


class ServerSender:
    """Implements `headway.weights.collective.Sender` for servers of `width` ranks each. `interface`: gloo's own.

    Every group meets at a store of its own, which goes when it breaks: that is what frees a server at once that still
    waits there for one that never came.
    """

    def __init__(self, host: str, timeout_s: float, *, width: int = 1, interface: str = "lo") -> None:
        self.width, self._interface = width, interface
        self._host, self._timeout_s = host, timeout_s
        self._store: Any = None
        self._group: Any = None
        self._key = ""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """A server takes whatever comes, so what must not be served is found here. Raises WeightsRefused."""
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsRefused(f"weights refused: {name!r} holds values that are not finite")

    def meet(self) -> int:
        """The port where a new group is to meet."""
        self._store, port = listen(self._host, self._timeout_s)
        return port

    def send(self, image: Tensor, layout: Layout, meeting: Meeting) -> None:
        """Form the group if it is a new one, and send; blocks. Raises RuntimeError when a rank is lost or late."""
        order = _in_order(layout)
        try:
            if meeting.key != self._key:
                self._leave()
                self._form(meeting, order)
            group = self._group  # its own: closing may come between
            for slot in order.values():
                tensor = image[slot.start : slot.end].view(slot.dtype).view(slot.shape)
                group.broadcast(tensor, 0).wait(timedelta(seconds=meeting.timeout_s))
            if image.is_cuda:
                torch.cuda.synchronize(image.device)
        except RuntimeError:
            self.part()
            raise

    def part(self) -> None:
        """Leave the group and the place where it met."""
        self._leave()
        self._store = None

    def _form(self, meeting: Meeting, order: Mapping[str, Slot]) -> None:
        sent = [
            Announced(name, str(slot.dtype).removeprefix("torch."), slot.shape, slot.end - slot.start)
            for name, slot in order.items()
        ]
        self._store.set(_place(meeting), msgspec.json.encode(sent))
        with _gloo_at(self._interface):
            self._group = self._new_group(meeting)
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(meeting.world)}
        self._key = meeting.key

    def _new_group(self, meeting: Meeting) -> Any:
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a lost rank ends this process, not the call
        group, _ = c10d._new_process_group_helper(
            meeting.world,
            0,
            [],
            c10d.Backend(meeting.backend),
            dist.PrefixStore(meeting.key, self._store),
            group_name=meeting.key,
            timeout=timedelta(seconds=meeting.timeout_s),
        )
        return group

    def _leave(self) -> None:
        group, self._group, self._key = self._group, None, ""
        if group is not None:
            dist.destroy_process_group(group)


@contextmanager
def _gloo_at(interface: str) -> Iterator[None]:
    """Gloo's interface for what is formed meanwhile; processes that start later shall not inherit it."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _in_order(layout: Layout) -> dict[str, Slot]:
    """What is sent, in order; a tied head once more by its own name, for servers may keep one that is not tied."""
    slots = layout.slots
    return slots if HEAD in slots or EMBEDDING not in slots else slots | {HEAD: slots[EMBEDDING]}


def _place(meeting: Meeting) -> str:
    return f"{meeting.key} announced"
