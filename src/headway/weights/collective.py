"""Weights by broadcast: the learner is rank 0 of a torch.distributed group, the engines are the other ranks.

What travels is the same bytes as a weights file holds; a `Sender` knows how engines want them. Everything about them
(version, checksum, size, who meets where) travels in the reference, by the engines' own messages.

| task | consumes | produces | waits for | unblocked by |
|---|---|---|---|---|
| `deliver`, one an engine | a version | an engine that holds it | an answer, its round | engine, supervisor |
| `_depart`, one a round | engines aboard | one broadcast | the round before; late ones, 1 s | engines, the clock |

A round takes whoever has answered: an engine that is slow to answer boards a later one. A group is kept while the same
engines meet, and formed anew when they do not. One that breaks (an engine died in the middle, or stopped) fails at
every rank by a closed connection or by `timeout_s`; those that live meet again without the lost one.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from headway.protocols import DeliveryFailed, Engine
from headway.types import EngineStatus, WeightRef
from headway.weights.group import ImageSender, Meeting
from headway.weights.layout import Layout, served

_PATIENCE_S = 1.0
"""How long a round waits for engines that have been asked but have not answered."""

_ATTEMPTS = 4
"""Rounds that may break under one delivery."""

Aboard = dict[Engine, "asyncio.Future[int]"]
"""Engines that take a version together, each with the version it arrives at."""


class Sender(Protocol):
    """Rank 0 of a group, and how one kind of engine forms it and is sent a version."""

    @property
    def width(self) -> int:
        """Ranks that each engine takes."""
        ...

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Look at what is published. Raises WeightsRefused."""
        ...

    def meet(self) -> int:
        """The port where the next group, which will have a key of its own, is to meet."""
        ...

    def send(self, image: Tensor, layout: Layout, meeting: Meeting) -> None:
        """Blocks. Raises RuntimeError when a rank is lost or late; the group is gone then."""
        ...

    def part(self) -> None:
        """Leave the group."""
        ...


class CollectiveChannel:
    """Publishes into a flat buffer and broadcasts it when engines ask for it.

    `dtype`: what floating-point tensors are rounded to, as engines do; None leaves them. `backend`: `gloo` sends from
    the host, `nccl` from `device`, which no engine may share. `timeout_s`: a meeting or a broadcast that takes longer
    is broken. `host`: this machine's address as engines reach it, and the only one that is listened on. `say` is told
    of every broken round. `sender`: made of `host` and `timeout_s`.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None,
        timeout_s: float,
        say: Callable[[str], None],
        backend: str = "gloo",
        device: str = "cpu",
        host: str = "127.0.0.1",
        sender: Callable[[str, float], Sender] = ImageSender,
    ) -> None:
        self._dtype, self._timeout_s, self._say = dtype, timeout_s, say
        self._backend, self._device, self._host = backend, device if backend == "nccl" else "cpu", host
        self._layout: Layout | None = None
        self._published: tuple[WeightRef, Tensor] | None = None
        self._sender = sender(host, timeout_s)
        self._port = self._sender.meet()
        self._members: list[Engine] = []
        self._key = ""  # of the group that there is
        self._asked: set[asyncio.Future[EngineStatus]] = set()
        self._boarding: Aboard | None = None
        self._departures: set[asyncio.Task[None]] = set()
        self._under_way = asyncio.Lock()

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Copy all tensors into a new buffer; a broadcast of the one before goes on undisturbed.

        Engines hold what they use in memory of their own, so `in_use` changes nothing.
        Raises ValueError when `version` does not grow or the layout changed, and WeightsRefused; the previous version
        then stays.
        """
        if self._published and version <= self._published[0].version:
            raise ValueError(f"version {version} published after version {self._published[0].version}")
        tensors = {name: served(tensor, self._dtype) for name, tensor in tensors.items()}
        self._sender.check(tensors)
        layout = Layout.of(tensors)
        if self._layout and (change := self._layout.difference(layout)):
            raise ValueError(f"the weights changed their layout after the first publish: {change}")
        image = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        header = bytearray(layout.header(version, "complete"))
        image[: layout.header_size].copy_(torch.frombuffer(header, dtype=torch.uint8))
        for name, slot in layout.slots.items():
            image[slot.start : slot.end].view(slot.dtype).view(slot.shape).copy_(tensors[name])
        checksum = xxhash.xxh3_64_hexdigest(image.cpu().numpy().data)
        ref = WeightRef(version, f"{self._backend}://{self._host}:{self._port}", checksum)
        self._layout, self._published = layout, (ref, image)
        return ref

    async def deliver(self, ref: WeightRef, engine: Engine) -> int:
        """Have the engine take part in a broadcast of the newest version; returns which that was.

        Raises WeightsRefused, DeliveryFailed after several broken rounds, and what the engine raises.
        """
        for attempt in count(1):
            asked = asyncio.ensure_future(engine.status())
            self._asked.add(asked)
            try:
                await asked  # an engine that does not answer must hold nobody up
            finally:
                self._asked.discard(asked)
            try:
                return await self._board(engine)
            except DeliveryFailed as error:
                if attempt == _ATTEMPTS:
                    raise
                self._say(f"{error}; forming the group again")
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Leave the group."""
        self._sender.part()

    async def _board(self, engine: Engine) -> int:
        if self._boarding is None:
            self._boarding = {}
            departure = asyncio.create_task(self._depart(self._boarding))
            self._departures.add(departure)
            departure.add_done_callback(self._departures.discard)
        arrival = self._boarding[engine] = asyncio.get_running_loop().create_future()
        return await arrival

    async def _depart(self, aboard: Aboard) -> None:
        """One round, after the one before."""
        async with self._under_way:
            if self._asked:
                await asyncio.wait(self._asked, timeout=_PATIENCE_S)
                self._asked.clear()  # who is late now is not waited for again
            self._boarding = None
            try:
                await self._broadcast({e: arrival for e, arrival in aboard.items() if not arrival.done()})
            except BaseException as error:
                for arrival in aboard.values():
                    if not arrival.done():
                        arrival.set_exception(error)
                if not isinstance(error, Exception):
                    raise  # else those who wait for an arrival have it, and nobody looks at this task

    async def _broadcast(self, aboard: Aboard) -> None:
        assert self._published is not None and self._layout is not None
        (ref, image), width = self._published, self._sender.width
        if not self._key or set(self._members) != set(aboard):
            self._members, self._key, self._port = list(aboard), secrets.token_hex(16), self._sender.meet()
        world = 1 + len(aboard) * width
        meeting = Meeting(self._backend, self._host, self._port, self._key, 0, world, image.numel(), self._timeout_s)
        takers = [
            asyncio.create_task(_take(engine, replace(ref, path=replace(meeting, rank=rank).url), aboard[engine]))
            for rank, engine in zip(count(1, width), self._members, strict=False)
        ]
        for taker, engine in zip(takers, self._members, strict=True):
            aboard[engine].add_done_callback(lambda _, taker=taker: taker.cancel())  # its engine is given up
        try:
            await asyncio.to_thread(self._sender.send, image, self._layout, meeting)
        except RuntimeError as error:  # what the engines say of it decides
            self._key = ""
            self._say(f"the broadcast of version {ref.version} broke: {str(error).splitlines()[0]}")
        outcomes = await asyncio.gather(*takers, return_exceptions=True)
        if not all(taken is True for taken in outcomes):
            self._key = ""  # one that left early may hold what the next version would trip over


async def _take(engine: Engine, ref: WeightRef, arrival: "asyncio.Future[int]") -> bool:
    """One engine's part in a round, and whether it has the version; its outcome goes to whoever delivers to it."""
    try:
        await engine.update_weights(ref)
    except Exception as error:
        if not arrival.done():
            arrival.set_exception(error)
        return False
    if not arrival.done():
        arrival.set_result(ref.version)
    return True
