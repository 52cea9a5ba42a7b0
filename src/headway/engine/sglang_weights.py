"""How an SGLang server is brought to a version: out of a folder, or by a broadcast that it takes part in.

A broadcast writes into the model as it comes, and nothing can be refused: one that breaks off leaves half a version.
So a server stays paused until one has come whole; whoever calls this pauses it before and lets it go on after.
"""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.engine.http import BadAnswer, Http, HttpError, structured
from headway.protocols import DeliveryFailed, WeightsRefused
from headway.types import WeightRef
from headway.weights.group import Meeting
from headway.weights.layout import refused
from headway.weights.servers import Announced, announced

PART_BYTES = 512 << 20
"""Of the tensors that one request names: the server holds them beside its model until it has loaded them."""

MAX_BROKEN = 3
"""Broadcasts in a row that a server may fail in; then it counts as lost. Less than a delivery has rounds."""


class Told(msgspec.Struct, frozen=True):
    """What the control endpoints answer."""

    success: bool
    message: str = ""


class Size(msgspec.Struct, frozen=True):
    """Of `/server_info`: ranks, by what they share out."""

    tp_size: int
    pp_size: int = 1
    dp_size: int = 1


class Unsuccessful(BadAnswer):
    """The server did not do as told, and says why."""


class SglangWeights:
    """One server's end. `num_ranks`: how many it is expected to have."""

    def __init__(self, http: Http, *, num_ranks: int) -> None:
        self._http, self._num_ranks = http, num_ranks
        self._group, self._is_known, self._num_broken = "", False, 0

    async def check_size(self) -> None:
        """Raises WeightsRefused when the server has other ranks than a meeting has places for."""
        if self._is_known:
            return
        size = structured(await self._info(), Size)
        if (size.tp_size, size.pp_size, size.dp_size) != (self._num_ranks, 1, 1):
            raise WeightsRefused(
                f"the SGLang server at {self._http.url} has tp_size {size.tp_size}, pp_size {size.pp_size} and dp_size "
                f'{size.dp_size}, but weights = "collective" counts on {self._num_ranks}, 1 and 1: a server that is '
                'joined may have one rank, one that is started --tp-size of them; or set weights to "disk"'
            )
        self._is_known = True

    async def load(self, ref: WeightRef, folder: Path) -> None:
        """Load a version from a folder. Raises BadAnswer when the server did not."""
        body = {"model_path": str(folder), "weight_version": str(ref.version), "flush_cache": True}
        try:
            await self._tell("/update_weights_from_disk", body)
        except Unsuccessful as error:
            raise BadAnswer(f"version {ref.version} was not loaded: {error}") from error

    async def announced(self, ref: WeightRef, meeting: Meeting) -> list[Announced]:
        """What will be sent. Raises as `receive` does."""
        try:
            return await asyncio.to_thread(announced, meeting)
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise self._broken(ref, f"nobody says what will be sent: {str(error).splitlines()[0]}") from error

    async def receive(self, ref: WeightRef, meeting: Meeting, tensors: Iterable[Announced]) -> None:
        """Take part in a broadcast. Raises DeliveryFailed when it broke off, BadAnswer when several in a row did."""
        try:
            await self._take_part(ref, meeting, tensors)
        except Unsuccessful as error:
            await self._leave()
            raise self._broken(ref, str(error)) from error
        self._num_broken = 0

    def _broken(self, ref: WeightRef, reason: str) -> Exception:
        """What to raise of a broadcast that did not come about: DeliveryFailed, after several in a row BadAnswer."""
        self._num_broken += 1
        if self._num_broken >= MAX_BROKEN:
            return BadAnswer(f"{self._num_broken} broadcasts in a row broke off, last: {reason}")
        return refused(ref, reason, DeliveryFailed)

    async def _take_part(self, ref: WeightRef, meeting: Meeting, tensors: Iterable[Announced]) -> None:
        if self._group != meeting.key:
            await self._leave()
            await self._join(meeting)
        has_session = await self._begin()
        parts = list(_parts(tensors))
        for i, part in enumerate(parts, start=1):
            body = {
                "names": [tensor.name for tensor in part],
                "dtypes": [tensor.dtype for tensor in part],
                "shapes": [tensor.shape for tensor in part],
                "group_name": meeting.key,
                "flush_cache": i == len(parts),
            }
            # Only what is whole has a name.
            label = {"weight_version": str(ref.version)} if i == len(parts) else {}
            await self._tell("/update_weights_from_distributed", body | label)
        if has_session:
            await self._tell("/end_weight_update", {})

    async def _join(self, meeting: Meeting) -> None:
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": meeting.rank,
            "world_size": meeting.world,
            "group_name": meeting.key,
            "backend": meeting.backend,
        }
        self._group = meeting.key  # also when it fails: some ranks may have joined
        await self._tell("/init_weights_update_group", body)

    async def _leave(self) -> None:
        """Also what did not come about: this closes the server's connections, which tells the others."""
        group, self._group = self._group, ""
        if group:
            try:
                await self._tell("/destroy_weights_update_group", {"group_name": group})
            except Unsuccessful:
                return  # there was none, or it was broken already

    async def _begin(self) -> bool:
        """Open a session, and say whether this server has such; one that broke off may have left its own open."""
        try:
            await self._tell("/begin_weight_update", {})
        except Unsuccessful:
            await self._tell("/end_weight_update", {})
            await self._tell("/begin_weight_update", {})
        except HttpError as error:
            if error.status != 404:
                raise
            return False  # before SGLang had sessions, none was needed
        return True

    async def _info(self) -> Any:
        try:
            return await self._http.get("/server_info")
        except HttpError as error:
            if error.status != 404:
                raise
            return await self._http.get("/get_server_info")  # its name before

    async def _tell(self, path: str, body: Any) -> None:
        """Raises Unsuccessful with the server's words."""
        try:
            told = structured(await self._http.post(path, body), Told)
        except HttpError as error:
            if error.status != 400:  # with which it says that it did not succeed
                raise
            raise Unsuccessful(f"{path}: {error}") from error
        if not told.success:
            raise Unsuccessful(f"{path}: {told.message}")


def _parts(tensors: Iterable[Announced]) -> Iterator[list[Announced]]:
    """The same in the same order, at most PART_BYTES at a time."""
    part: list[Announced] = []
    for tensor in tensors:
        if part and sum(t.num_bytes for t in part) + tensor.num_bytes > PART_BYTES:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part
