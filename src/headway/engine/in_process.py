"""The built-in engine inside this process: the same requests as over a socket, answered by one task of the loop."""

import asyncio
from itertools import count
from typing import Any

from headway.engine.request import origin_of
from headway.engine.torch_engine import TorchEngine
from headway.protocols import RequestRefused
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Sampling, WeightRef
from headway.weights import WeightReader


class InProcessEngine:
    """An `Engine` around a `TorchEngine` that has its weights; for offline work, which has no learner to overlap with.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `_drive` | requests | completions | nothing: it ends when no request is unfinished | – |

    Shutdown: it ends by itself; `generate` starts it again.
    """

    def __init__(self, engine: TorchEngine, *, dtype: str) -> None:
        self._engine = engine
        self._dtype = dtype
        self._reader = WeightReader()
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        """Continue `token_ids`. Raises RequestRefused, NotFinite, and whatever else a step of the engine raises."""
        id = next(self._ids)
        try:
            self._engine.submit(id, token_ids, sampling)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        self._futures[id] = asyncio.get_running_loop().create_future()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await self._futures[id]
        finally:
            self._engine.cancel(id)
            del self._futures[id]

    async def update_weights(self, ref: WeightRef) -> None:
        """Swap in flight. Raises WeightsRefused."""
        self._engine.load(self._reader.read(ref), ref.version)

    async def interrupt(self) -> None:
        """Make every unfinished `generate` return what it has."""
        self._resolve(self._engine.interrupt())

    async def status(self) -> EngineStatus:
        """The engine's own account of itself."""
        return self._engine.status

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        """What `Completion.logprobs` were taken under."""
        return origin_of(sampling, engine="torch", dtype=self._dtype)

    async def _drive(self) -> None:
        while self._engine.has_work:
            try:
                self._resolve(self._engine.step())
            except Exception as error:  # whoever waits must hear of it: nobody awaits this task
                self._engine.clear()
                for future in self._futures.values():
                    if not future.done():
                        future.set_exception(error)
            # Whoever got an answer may ask again before the next step.
            await asyncio.sleep(0)

    def _resolve(self, finished: list[tuple[Any, Completion]]) -> None:
        for id, completion in finished:
            if not self._futures[id].done():
                self._futures[id].set_result(completion)
