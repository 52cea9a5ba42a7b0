"""The engine's server reads new weights beside its work, and swaps them in between two steps."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import zmq
from scripted import completion

from headway.engine.client import EngineClient
from headway.engine.server import EngineServer
from headway.processes.router import bound_router
from headway.protocols import EngineDied, WeightsRefused
from headway.types import EngineStatus, Sampling, WeightRef

IDS = np.array([1], np.int32)


class Toy:
    """An engine whose requests end when they are told to, each with the version it then has."""

    def __init__(self) -> None:
        self.version, self.has_work = 0, False
        self.requests: list[Any] = []
        self.may_finish = threading.Event()

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(self.version, len(self.requests), 0, 0, 0.0, 0.0)

    def submit(self, key: Any, token_ids: object, sampling: object) -> None:
        self.requests.append(key)
        self.has_work = True

    def cancel(self, key: Any) -> None:
        self.requests = [request for request in self.requests if request != key]
        self.has_work = bool(self.requests)

    def step(self) -> list[Any]:
        return self._end("stop") if self.may_finish.wait(0.002) else []

    def interrupt(self) -> list[Any]:
        return self._end("interrupt")

    def load(self, tensors: object, version: int) -> None:
        self.version = version

    def _end(self, reason: Any) -> list[Any]:
        ended, self.requests, self.has_work = self.requests, [], False
        return [(key, completion([5], [self.version], reason)) for key in ended]


Work = Callable[[EngineClient, Toy, threading.Event], Awaitable[None]]


def serving(work: Work, *, refuse: bool = False, hands_back: bool = False) -> None:
    """Call `work(client, engine, may_read)`; nothing is read before `may_read` is set."""
    engine, may_read = Toy(), threading.Event()

    def read(ref: WeightRef) -> dict[str, Any]:
        may_read.wait(20)
        if refuse:
            raise WeightsRefused(f"version {ref.version} refused")
        return {}

    with bound_router() as socket:
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        server = EngineServer(
            engine,  # pyright: ignore[reportArgumentType]
            socket,
            token="key",
            read_weights=read,
            hands_back=hands_back,
        )
        thread = threading.Thread(target=server.run)
        thread.start()

        async def main() -> None:
            client = EngineClient(endpoint, "key", timeout_s=20)
            try:
                async with asyncio.timeout(20):
                    await work(client, engine, may_read)
            finally:
                client.close()

        try:
            asyncio.run(main())
        finally:
            may_read.set()
            server.stop()
            thread.join()


def test_an_engine_answers_and_generates_while_a_version_is_being_read():
    async def work(client: EngineClient, engine: Toy, may_read: threading.Event) -> None:
        engine.may_finish.set()
        update = asyncio.ensure_future(client.update_weights(WeightRef(1, "", "")))
        assert (await client.status()).version == 0
        assert (await client.generate(IDS, Sampling(max_tokens=1))).versions.tolist() == [0]
        may_read.set()
        await update
        assert (await client.generate(IDS, Sampling(max_tokens=1))).versions.tolist() == [1]

    serving(work)


def test_with_hands_back_a_version_returns_what_is_unfinished_in_the_moment_it_comes_in():
    async def work(client: EngineClient, engine: Toy, may_read: threading.Event) -> None:
        running = asyncio.ensure_future(client.generate(IDS, Sampling(max_tokens=1)))
        update = asyncio.ensure_future(client.update_weights(WeightRef(1, "", "")))
        await client.status()
        assert not running.done() and engine.requests  # it goes on while the version is being read
        may_read.set()
        assert (await running).finish_reason == "interrupt"
        await update
        engine.may_finish.set()
        assert (await client.generate(IDS, Sampling(max_tokens=1))).versions.tolist() == [1]

    serving(work, hands_back=True)


def test_a_version_that_is_refused_interrupts_nothing():
    async def work(client: EngineClient, engine: Toy, may_read: threading.Event) -> None:
        running = asyncio.ensure_future(client.generate(IDS, Sampling(max_tokens=1)))
        may_read.set()
        with pytest.raises(WeightsRefused, match="version 1 refused"):
            await client.update_weights(WeightRef(1, "", ""))
        await client.status()
        assert not running.done()
        engine.may_finish.set()
        answer = await running
        assert answer.finish_reason == "stop" and answer.versions.tolist() == [0]

    serving(work, refuse=True, hands_back=True)


def test_what_is_given_back_is_asked_for_elsewhere_and_forgotten_by_the_engine():
    async def work(client: EngineClient, engine: Toy, may_read: threading.Event) -> None:
        lost = asyncio.ensure_future(client.generate(IDS, Sampling(max_tokens=1)))
        await asyncio.sleep(0)  # sent before the question
        assert (await client.status()).num_active == 1
        client.give_back(EngineDied("silent"))
        with pytest.raises(EngineDied, match="silent"):
            await lost
        assert (await client.status()).num_active == 0
        engine.may_finish.set()
        assert (await client.generate(IDS, Sampling(max_tokens=1))).finish_reason == "stop"

    serving(work)
