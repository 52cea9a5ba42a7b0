"""`on_update = "interrupt"` over every channel: no token after an update follows keys and values of the one before."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from tiny_models import build_model, logprobs_by_transformers, weights_of

from headway.engine.client import EngineClient
from headway.engine.hosting import Host
from headway.engine.server import EngineServer
from headway.engine.torch_engine import TorchEngine
from headway.processes.router import bound_router
from headway.protocols import WeightChannel
from headway.runtime.local import EnginePool
from headway.runtime.signal import Signal
from headway.types import Completion, Sampling, WeightRef
from headway.weights import CollectiveChannel, DeltaChannel, MemoryChannel, WeightReader

torch.set_num_threads(1)

PROMPT = np.arange(1, 9, dtype=np.int32)
SAMPLING = Sampling(max_tokens=1200, seed=7)


@dataclass
class InThread:
    """A host whose engine's server is a thread of this process."""

    client: EngineClient

    def poll(self) -> int | None:
        return None

    def kill(self) -> None: ...

    def stop(self) -> int:
        return 0

    def log_tail(self) -> str:
        return ""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where the built-in engine is served, as `engines.on_update = "interrupt"` has it served."""
    engine = TorchEngine(build_model().config, max_slots=4, max_length=1300)
    with bound_router() as socket:
        server = EngineServer(
            engine,
            socket,
            token="key",
            read_weights=WeightReader().read,
            hands_back=True,
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
        server.stop()
        thread.join()


def open_channel(kind: str, place: Path, said: list[str]) -> WeightChannel:
    match kind:
        case "memory":
            return MemoryChannel(place)
        case "collective":
            return CollectiveChannel(dtype=None, timeout_s=20, say=said.append)
        case _:
            return DeltaChannel(place, dtype=None, say=said.append)


async def episode(pool: EnginePool) -> tuple[Any, Any]:
    """As a rollout plays it: what comes back unfinished is asked for again at once."""
    parts: list[Completion] = []
    next_engine, num = pool.affine(), 0
    while num < SAMPLING.max_tokens:
        engine = await next_engine()
        tokens = np.concatenate([PROMPT, *(part.token_ids for part in parts)])
        parts.append(await engine.generate(tokens, replace(SAMPLING, max_tokens=SAMPLING.max_tokens - num)))
        num += len(parts[-1].token_ids)
    columns = [(part.token_ids, part.versions, part.logprobs) for part in parts]
    tokens, versions, logprobs = map(np.concatenate, zip(*columns, strict=True))
    return tokens, [versions, logprobs]


@pytest.mark.parametrize("kind", ["memory", "delta", "collective"])
def test_no_token_after_an_update_follows_keys_of_the_version_before(kind: str, endpoint: str, tmp_path: Path):
    said: list[str] = []
    before, after = build_model(seed=0), build_model(seed=1)

    async def work(channel: WeightChannel, client: EngineClient) -> tuple[Any, Any]:
        def launch(name: str, log_path: Path) -> Host:
            return InThread(client)

        pool = EnginePool(
            launch,
            num_engines=1,
            logs=tmp_path,
            signal=Signal(),
            num_slots=4,
            max_restarts=0,
            patience_s=20,
            stall_s=20,
            say=said.append,
        )
        await pool.start(channel.publish(0, weights_of(before)), channel.deliver)
        playing = asyncio.ensure_future(episode(pool))
        while (await client.status()).num_tokens < 20:
            await asyncio.sleep(0.001)
        ref = channel.publish(1, weights_of(after))
        await pool.update(damaged(ref) if kind == "delta" else ref)
        return await playing

    async def main() -> tuple[Any, Any]:
        channel, client = open_channel(kind, tmp_path, said), EngineClient(endpoint, "key")
        try:
            return await asyncio.wait_for(work(channel, client), 30)
        finally:
            client.close()
            channel.close()

    tokens, (versions, logprobs) = asyncio.run(main())
    assert set(versions.tolist()) == {0, 1}
    expected = logprobs_by_transformers(after, PROMPT, tokens, 1.0).gather(-1, torch.from_numpy(tokens)[:, None].long())
    new = torch.from_numpy(versions == 1)
    torch.testing.assert_close(torch.from_numpy(logprobs)[new], expected[:, 0][new], atol=1e-4, rtol=0)
    assert [line for line in said if "sending version 1 whole" in line] or kind != "delta"


def damaged(ref: WeightRef) -> WeightRef:
    """A difference that no engine can use: it must be sent the whole version."""
    return replace(ref, checksum="0" * 16)
