"""The asyncio side of an engine's process: implements `headway.protocols.Engine`."""

import asyncio
from typing import Any

import msgspec

from headway.engine.messages import Cancel, Failed, Interrupt, Reply, Shutdown, Status, Submit, Update
from headway.engine.request import origin_of
from headway.errors import AccessRefused
from headway.processes.dealer import Dealer
from headway.protocols import DeliveryFailed, EngineDied, NotFinite, RequestRefused, WeightsRefused
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Sampling, WeightRef
from headway.wire import decode

_ERRORS: dict[str, type[Exception]] = {
    "ValueError": RequestRefused,
    "WeightsRefused": WeightsRefused,
    "DeliveryFailed": DeliveryFailed,
    "NotFinite": NotFinite,
}


class EngineClient:
    """Talks to one server. Must be used from one event loop; connects on first use.

    `timeout_s` bounds update, interrupt and status, not generation: how long that takes is the request's own matter.
    """

    def __init__(
        self, endpoint: str, token: str, *, timeout_s: float = 60.0, name: str = "torch", dtype: str = "float32"
    ) -> None:
        self.endpoint, self.name = endpoint, name
        self.last_status: EngineStatus | None = None
        """As of the latest reply."""
        self._timeout_s, self._dtype = timeout_s, dtype
        self._generating: set[int] = set()
        self._dealer = Dealer(endpoint, token, receive=self._receive)

    @property
    def num_pending(self) -> int:
        """Calls not yet answered."""
        return self._dealer.num_pending

    @property
    def is_lost(self) -> bool:
        """Whether the server's answers made no sense, or the client was told to give up."""
        return self._dealer.is_lost

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        """Continue `token_ids`. Raises ValueError when the engine refuses the request, EngineDied when it is gone."""
        id, future = self._dealer.expect()
        self._dealer.send(Submit(id, token_ids, sampling))
        self._generating.add(id)
        try:
            return await future
        except asyncio.CancelledError:
            if self._dealer.is_connected:
                self._dealer.send(Cancel(id))
            raise
        finally:
            self._generating.discard(id)
            self._dealer.forget(id)

    async def update_weights(self, ref: WeightRef) -> None:
        """Swap in flight. Raises WeightsRefused with the server's reason; it then keeps its previous version."""
        await self._call(Update, f"update to version {ref.version}", ref)

    async def interrupt(self) -> None:
        """Make every unfinished `generate` return what it has."""
        await self._call(Interrupt, "interrupt")

    async def status(self) -> EngineStatus:
        """The engine's own account of itself, now."""
        return await self._call(Status, "status")

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        """What `Completion.logprobs` were taken under; greedy requests report the plain distribution."""
        return origin_of(sampling, engine=self.name, dtype=self._dtype)

    def shutdown(self) -> None:
        """Ask the server to exit."""
        self._dealer.send(Shutdown())

    def give_back(self, error: Exception) -> None:
        """Raise `error` from every unfinished `generate`; the engine forgets them when it can."""
        for id in self._generating:
            self._dealer.reject(id, error)
            self._dealer.send(Cancel(id))

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call: for whoever watches the process."""
        self._dealer.fail_all(error)

    def close(self) -> None:
        """Hang up; pending calls raise EngineDied."""
        self._dealer.close(EngineDied(f"the client of engine {self.name!r} at {self.endpoint} was closed"))

    async def _call(self, kind: type[Any], what: str, *args: Any) -> EngineStatus:
        id, future = self._dealer.expect()
        self._dealer.send(kind(id, *args))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            raise TimeoutError(
                f"engine {self.name!r} at {self.endpoint} did not answer {what} within {self._timeout_s:g} s"
            ) from None
        finally:
            self._dealer.forget(id)

    def _receive(self, payload: bytes) -> None:
        try:
            reply = decode(payload, Reply)
        except msgspec.MsgspecError as error:
            self.fail_all(EngineDied(f"engine {self.name!r} at {self.endpoint} sent a malformed reply: {error}"))
            return
        if reply.refused is not None:
            self.fail_all(AccessRefused(f"engine {self.name!r} at {self.endpoint} refused: {reply.refused}"))
            return
        self.last_status = reply.status
        for finished in reply.finished:
            self._dealer.resolve(finished.id, finished.completion)
        for failed in reply.failed:
            self._dealer.reject(failed.id, _error_of(failed))
        for id in reply.done:
            self._dealer.resolve(id, reply.status)


def _error_of(failed: Failed) -> Exception:
    kind = _ERRORS.get(failed.kind)
    return kind(failed.text) if kind else RuntimeError(f"{failed.kind}: {failed.text}")
