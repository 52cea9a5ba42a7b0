"""Weights by broadcast: the learner is rank 0 of a torch.distributed group, the engines are the other ranks.

What travels is the same bytes as a weights file holds. Everything about them (version, checksum, size, who meets where)
travels in the reference, by the engines' own messages.

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
from typing import Any

import torch
import xxhash
from torch import Tensor

from headway.protocols import DeliveryFailed, Engine
from headway.types import EngineStatus, WeightRef
from headway.weights.group import Meeting, broadcast, form, listen
from headway.weights.layout import Layout, served

_PATIENCE_S = 1.0
"""How long a round waits for engines that have been asked but have not answered."""

_ATTEMPTS = 4
"""Rounds that may break under one delivery."""

Aboard = dict[Engine, "asyncio.Future[int]"]
"""Engines that take a version together, each with the version it arrives at."""


class CollectiveChannel:
    """Publishes into a flat buffer and broadcasts it when engines ask for it.

    `dtype`: what floating-point tensors are rounded to, as engines do; None leaves them. `backend`: `gloo` sends from
    the host, `nccl` from `device`, which no engine may share. `timeout_s`: a meeting or a broadcast that takes longer
    is broken. `host`: this machine's address as engines reach it, and the only one that is listened on. `say` is told
    of every broken round.
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
    ) -> None:
        self._dtype, self._timeout_s, self._say = dtype, timeout_s, say
        self._backend, self._device, self._host = backend, device if backend == "nccl" else "cpu", host
        self._layout: Layout | None = None
        self._published: tuple[WeightRef, Tensor] | None = None
        self._store, self._port = listen(host, timeout_s)
        self._group: Any = None
        self._members: list[Engine] = []
        self._key = ""
        self._asked: set[asyncio.Future[EngineStatus]] = set()
        self._boarding: Aboard | None = None
        self._departures: set[asyncio.Task[None]] = set()
        self._under_way = asyncio.Lock()

    def publish(self, version: int, tensors: Mapping[str, Tensor], in_use: Collection[int] = ()) -> WeightRef:
        """Copy all tensors into a new buffer; a broadcast of the one before goes on undisturbed.

        Engines hold what they use in memory of their own, so `in_use` changes nothing.
        Raises ValueError when `version` does not grow or the layout changed; the previous version then stays.
        """
        if self._published and version <= self._published[0].version:
            raise ValueError(f"version {version} published after version {self._published[0].version}")
        tensors = {name: served(tensor, self._dtype) for name, tensor in tensors.items()}
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
        self._group = None

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
        assert self._published is not None
        ref, image = self._published
        if self._group is None or set(self._members) != set(aboard):
            self._group, self._members, self._key = None, list(aboard), secrets.token_hex(16)
        meeting = Meeting(
            self._backend, self._host, self._port, self._key, 0, len(aboard) + 1, image.numel(), self._timeout_s
        )
        takers = [
            asyncio.create_task(_take(engine, replace(ref, path=replace(meeting, rank=rank).url), aboard[engine]))
            for rank, engine in enumerate(self._members, start=1)
        ]
        for taker, engine in zip(takers, self._members, strict=True):
            aboard[engine].add_done_callback(lambda _, taker=taker: taker.cancel())  # its engine is given up
        try:
            await asyncio.to_thread(self._send, image, meeting)
        except RuntimeError as error:  # what the engines say of it decides
            self._group = None
            self._say(f"the broadcast of version {ref.version} broke: {str(error).splitlines()[0]}")
        await asyncio.gather(*takers, return_exceptions=True)

    def _send(self, image: Tensor, meeting: Meeting) -> None:
        self._group = self._group or form(self._store, meeting)
        broadcast(self._group, image, meeting)


async def _take(engine: Engine, ref: WeightRef, arrival: "asyncio.Future[int]") -> None:
    """One engine's part in a round; its outcome goes to whoever delivers to it."""
    try:
        await engine.update_weights(ref)
    except Exception as error:
        if not arrival.done():
            arrival.set_exception(error)
    else:
        if not arrival.done():
            arrival.set_result(ref.version)
