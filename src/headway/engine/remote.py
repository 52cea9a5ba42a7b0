"""An engine behind HTTP: what the vLLM and SGLang adapters share.

Consumes: requests. Produces: completions. Waits for: a slot, which updates withhold; the server. Unblocked by: other
completions, the end of an update, `fail_all`. A server that cannot be reached fails every call until it is replaced.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, TypeVar, final

import numpy as np

from headway.engine.busy import BusyTime
from headway.engine.http import BadAnswer, Http, HttpError
from headway.engine.request import Request, make_request
from headway.engine.turnstile import Turnstile
from headway.engine.weight_files import Expected, verified
from headway.errors import AccessRefused
from headway.protocols import EngineDied, RequestRefused
from headway.types import (
    LOGPROB_SLACK,
    NO_VERSION,
    Completion,
    EngineStatus,
    Ints,
    LogprobOrigin,
    Sampling,
    SideData,
    WeightRef,
)

T = TypeVar("T")

LOST_PAUSE_S = 0.2
"""How long a call that lost its server waits before it says so: the supervisor is to see the loss first."""


class RemoteEngine(ABC):
    """Implements `headway.protocols.Engine`, and what a pool of engines asks of a client, over HTTP.

    Must be used from one event loop. `timeout_s` bounds update, interrupt and status, not generation. `can_route`,
    `has_entropy`: whether the server reports experts chosen, and the entropy of each token. `expected`: names and
    shapes that weights must have. `on_update`: what happens to sequences in flight; with `interrupt` they are handed
    back once a version was found whole, and nothing enters before the server has it.
    """

    can_route = False
    has_entropy = True

    def __init__(
        self,
        url: str,
        *,
        key: str,
        name: str,
        vocab_size: int,
        max_slots: int,
        max_length: int,
        expected: Expected,
        on_update: Literal["keep", "recompute", "interrupt"] = "keep",
        record_logprobs: bool = True,
        dtype: str = "float32",
        timeout_s: float = 60.0,
    ) -> None:
        self.name, self.version = name, NO_VERSION
        self.last_status: EngineStatus | None = None
        self._http = Http(url, key=key)
        self._vocab_size, self._max_length, self._expected = vocab_size, max_length, expected
        self._on_update = on_update
        self._record_logprobs, self._dtype, self._timeout_s = record_logprobs, dtype, timeout_s
        self._turnstile, self._max_slots = Turnstile(max_slots), max_slots
        # Of this client alone: a server that is joined again may still be busy with what an earlier client asked.
        self._prefix, self._ids = f"{name}-{secrets.token_hex(4)}", count()
        self._calls: set[asyncio.Task[Completion]] = set()
        self._given_back: dict[asyncio.Task[Completion], Exception] = {}
        self._inside: dict[str, asyncio.Task[Any]] = {}
        self._changing = asyncio.Lock()
        self._error: Exception | None = None
        self._started = time.monotonic()
        self._num_tokens, self._busy = 0, BusyTime()

    @property
    def endpoint(self) -> str:
        return self._http.url

    @property
    def num_pending(self) -> int:
        """Generations not yet answered."""
        return len(self._calls)

    @property
    def is_lost(self) -> bool:
        """Whether the server stopped answering, or the client was told to give up."""
        return self._error is not None

    @property
    def lost_by(self) -> str:
        """What lost the server, which its own log may not know; empty while it is there."""
        return str(self._error or "")

    @final
    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        """Continue `token_ids`. Raises RequestRefused, EngineDied."""
        self._require_alive()
        id = f"{self._prefix}-{next(self._ids)}"
        request = self._checked(id, token_ids, sampling)
        task = asyncio.ensure_future(self._serve(id, request))
        self._calls.add(task)
        self._busy.note(has_work=True)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and (error := self._error or self._given_back.get(task)) is not None:
                raise error from None
            task.cancel()
            raise
        finally:
            self._calls.discard(task)
            self._busy.note(has_work=bool(self._calls))
            self._given_back.pop(task, None)

    @final
    async def update_weights(self, ref: WeightRef) -> None:
        """Swap in flight. Raises WeightsRefused when the version did not arrive whole, EngineDied."""
        self._require_alive()
        # At once, before any await: what an interrupt hands back must not re-enter under the previous weights.
        self._turnstile.shut()
        try:
            async with self._changing, self._limit(f"update to version {ref.version}"):
                await self._verify(ref)
                if self._on_update == "interrupt":
                    await self._hand_back()
                await self._reach(self._swap(ref))
                self.version = ref.version
        finally:
            self._turnstile.open()
            self._note_status()

    @final
    async def interrupt(self) -> None:
        """Make every unfinished `generate` return what it has."""
        self._require_alive()
        async with self._changing, self._limit("interrupt"):
            self._turnstile.turn_away()
            await self._hand_back()

    @final
    async def status(self) -> EngineStatus:
        """Is it there, and how much has it done; seconds and counts are this client's own."""
        self._require_alive()
        async with self._limit("status"):
            await self._reach(self._http.get("/health"))
        return self._note_status()

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        """What `Completion.logprobs` were taken under; greedy requests report the plain distribution."""
        greedy = sampling.temperature == 0
        return LogprobOrigin(
            role="behavior",
            engine=self.name,
            dtype=self._dtype,
            temperature=1.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
        )

    def give_back(self, error: Exception) -> None:
        """Raise `error` from every unfinished `generate`, and hang up on it."""
        for task in list(self._calls):
            self._given_back[task] = error
            task.cancel()

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call."""
        self._error = self._error or error
        for task in list(self._calls):
            task.cancel()

    def close(self) -> None:
        """Give up; pending calls raise EngineDied."""
        self.fail_all(EngineDied(f"the client of engine {self.name!r} at {self.endpoint} was closed"))

    async def _verify(self, ref: WeightRef) -> None:
        """Look at a version before the server is touched. Raises WeightsRefused."""
        await asyncio.to_thread(verified, ref, self._expected)

    @abstractmethod
    async def _complete(self, id: str, request: Request) -> Completion:
        """Ask the server for one completion."""

    @abstractmethod
    async def _swap(self, ref: WeightRef) -> None:
        """Make the server use a version that was found whole; nobody enters meanwhile."""

    @abstractmethod
    async def _abort(self, ids: list[str]) -> None:
        """Make the server answer these requests with what they have."""

    async def _hand_back(self) -> None:
        """Make everything at the server return what it has."""
        inside = dict(self._inside)
        # Again and again: an abort may overtake the request that it names.
        while left := {id: task for id, task in inside.items() if not task.done()}:
            await self._reach(self._abort(list(left)))
            await asyncio.wait(left.values(), timeout=0.1)

    def _checked(self, id: str, token_ids: Ints, sampling: Sampling) -> Request:
        if sampling.record_routing and not self.can_route:
            raise RequestRefused(f"request {id!r}: record_routing is not offered by engine {self.name!r}")
        limits = {"vocab_size": self._vocab_size, "max_length": self._max_length}
        try:
            return make_request(id, token_ids, sampling, **limits, is_sparse=self.can_route)
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    async def _serve(self, id: str, request: Request) -> Completion:
        if not await self._turnstile.enter(request.sampling.priority):
            return self._nothing(request)
        task = asyncio.current_task()
        assert task is not None
        self._inside[id] = task
        try:
            completion = await self._reach(self._held(id, request))
            self._num_tokens += len(completion.token_ids)
            return completion
        finally:
            del self._inside[id]
            self._turnstile.leave()
            self._note_status()

    async def _held(self, id: str, request: Request) -> Completion:
        """A completion that keeps to what was asked for. Raises BadAnswer."""
        completion = await self._complete(id, request)
        tokens, logprobs = completion.token_ids, completion.logprobs
        if len(tokens) > request.sampling.max_tokens or not (len(tokens) or completion.finish_reason == "interrupt"):
            raise BadAnswer(f"{len(tokens)} tokens came back, {request.sampling.max_tokens} were asked for")
        if completion.entropy is not None and not np.isfinite(completion.entropy).all():
            raise BadAnswer("an entropy came back that is no finite number")
        ids = [
            ids for ids in (tokens, completion.side.draw_ids, completion.side.top_ids) if ids is not None and ids.size
        ]
        if ids and not 0 <= min(map(np.min, ids)) <= max(map(np.max, ids)) < self._vocab_size:
            raise BadAnswer(f"a token came back that is not in the vocabulary of {self._vocab_size}")
        if logprobs is not None and not (np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)).all():
            raise BadAnswer("a log-prob came back that is not a finite number ≤ 0")
        return completion

    def _nothing(self, request: Request) -> Completion:
        """What a request has that was interrupted before it began."""
        empty, s = np.zeros(0, np.int32), request.sampling
        logprobs = np.zeros(0, np.float32) if self._record_logprobs else None
        side: dict[str, Any] = {}
        for name, width in (("draw", s.num_draws), ("top", s.num_top)):
            if width:
                side[f"{name}_ids"] = np.zeros((0, width), np.int32)
                side[f"{name}_logprobs"] = np.zeros((0, width), np.float32)
        entropy = logprobs if self.has_entropy else None
        return Completion(empty, empty, "interrupt", logprobs, entropy, SideData(**side))

    async def _reach(self, answer: Awaitable[T]) -> T:
        """Await an answer; a server that gives none, or nonsense, is lost."""
        try:
            return await answer
        except HttpError as error:
            if error.status < 500:
                refusal = f"engine {self.name!r} at {self.endpoint} refused: {error}"
                if error.status in (401, 403):
                    raise AccessRefused(f"{refusal}; it wants the key that engines.api_key_env names") from error
                raise RequestRefused(refusal) from error
            await self._lose(error)
        except (OSError, BadAnswer) as error:
            await self._lose(error)
        raise AssertionError("unreachable")

    async def _lose(self, error: Exception) -> None:
        lost = EngineDied(f"engine {self.name!r} at {self.endpoint} is lost: {error}")
        self._error = self._error or lost
        await asyncio.sleep(LOST_PAUSE_S)
        raise self._error from error

    @asynccontextmanager
    async def _limit(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise TimeoutError(
                f"engine {self.name!r} at {self.endpoint} did not answer {what} within {self._timeout_s:g} s"
            ) from None

    def _require_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def _note_status(self) -> EngineStatus:
        self.last_status = EngineStatus(
            version=self.version,
            num_active=len(self._inside),
            num_waiting=self._turnstile.num_waiting,
            num_tokens=self._num_tokens,
            busy_s=self._busy.seconds,
            up_s=time.monotonic() - self._started,
        )
        return self.last_status
