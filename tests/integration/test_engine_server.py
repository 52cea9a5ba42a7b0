"""The engine as a process: what its client sees when things go well, badly, and away."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import zmq
from tiny_models import VOCAB, build_model, weights_of

from headway.engine.client import EngineClient
from headway.engine.messages import EngineSettings, Reply
from headway.engine.process import EngineProcess, start_engine
from headway.engine.torch_engine import TorchEngine
from headway.protocols import EngineDied, WeightsRefused
from headway.types import Completion, Sampling
from headway.weights import DiskChannel
from headway.wire import decode

torch.set_num_threads(1)

PROMPT = np.array([1, 2, 3], np.int32)
PLAIN = Sampling(max_tokens=10, seed=7)
LONG = replace(PLAIN, max_tokens=20_000)
TOKEN = "a token for tests"


def settings_in(folder: Path) -> EngineSettings:
    build_model().config.save_pretrained(folder)
    return EngineSettings(config=str(folder), max_slots=16, max_length=30_000)


def start_in(folder: Path, **options: Any) -> EngineProcess:
    return start_engine(settings_in(folder), log_path=folder / "engine.log", token=TOKEN, **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = start_in(tmp_path_factory.mktemp("engine"))
    yield process
    assert process.poll() is None
    assert process.stop() == 0


def client_of(engine: EngineProcess, token: str = TOKEN, **options: Any) -> EngineClient:
    # One client serves one event loop, and every test runs its own.
    return EngineClient(engine.client.endpoint, token, **options)


def run(engine: EngineProcess, work: Any, **options: Any) -> Any:
    async def main() -> Any:
        client = client_of(engine, **options)
        try:
            return await asyncio.wait_for(work(client), 30)
        finally:
            client.close()

    return asyncio.run(main())


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[DiskChannel]:
    channel = DiskChannel(tmp_path / "weights")
    yield channel
    channel.close()


def test_fifty_requests_at_once_are_answered_as_the_engine_alone_would(engine: EngineProcess, channel: DiskChannel):
    model = build_model()
    ref = channel.publish(1, weights_of(model))

    async def work(client: EngineClient) -> list[Completion]:
        await client.update_weights(ref)
        return await asyncio.gather(*(client.generate(PROMPT, replace(PLAIN, seed=i)) for i in range(50)))

    found = run(engine, work)
    alone = TorchEngine(model.config, max_slots=50, max_length=64)
    alone.load(weights_of(model), 1)
    for answer, expected in zip(found, alone.generate([PROMPT], replace(PLAIN, seed=0), n=50)[0], strict=True):
        assert answer.token_ids.tolist() == expected.token_ids.tolist()
        assert answer.versions.tolist() == [1] * 10
        assert expected.logprobs is not None
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-5)


def test_an_update_and_an_interrupt_reach_requests_in_flight(engine: EngineProcess, channel: DiskChannel):
    first, second = (channel.publish(v, weights_of(build_model(seed=v))) for v in (10, 11))

    async def work(client: EngineClient) -> Completion:
        await client.update_weights(first)
        request = asyncio.create_task(client.generate(PROMPT, LONG))
        await until_sampled(client, 20)
        await client.update_weights(second)
        await until_sampled(client, 20)
        await client.interrupt()
        return await request

    partial = run(engine, work)
    assert partial.finish_reason == "interrupt"
    assert set(partial.versions.tolist()) == {10, 11}
    assert (np.diff(partial.versions) >= 0).all()


async def until_sampled(client: EngineClient, more: int) -> None:
    target = (await client.status()).num_tokens + more
    while (await client.status()).num_tokens < target:
        await asyncio.sleep(0.01)


def test_a_bad_request_raises_at_its_awaiter_and_the_others_go_on(engine: EngineProcess, channel: DiskChannel):
    ref = channel.publish(1, weights_of(build_model()))

    async def work(client: EngineClient) -> tuple[Any, Any]:
        await client.update_weights(ref)
        bad = client.generate(np.array([VOCAB], np.int32), PLAIN)
        return await asyncio.gather(client.generate(PROMPT, PLAIN), bad, return_exceptions=True)

    good, bad = run(engine, work)
    assert len(good.token_ids) == 10
    assert isinstance(bad, ValueError) and "outside the vocabulary" in str(bad)


def test_cancelling_the_awaiter_cancels_the_request(engine: EngineProcess, channel: DiskChannel):
    ref = channel.publish(1, weights_of(build_model()))

    async def work(client: EngineClient) -> None:
        await client.update_weights(ref)
        request = asyncio.create_task(client.generate(PROMPT, LONG))
        await until_sampled(client, 5)
        request.cancel()
        while (await client.status()).num_active:
            await asyncio.sleep(0.01)
        assert request.cancelled()

    run(engine, work)


def test_a_wrong_token_is_refused_and_nothing_is_done(engine: EngineProcess):
    with pytest.raises(PermissionError, match="wrong token"):
        run(engine, lambda client: client.status(), token="another token")
    assert run(engine, lambda client: client.status()).num_active == 0


def test_malformed_messages_are_ignored(engine: EngineProcess):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(engine.client.endpoint)
        for frames in (
            [b""],
            [TOKEN.encode()],
            [TOKEN.encode(), b"\xc1 nonsense"],
            [TOKEN.encode(), b"\x80"],
            [b"x"] * 5,
        ):
            socket.send_multipart(frames)
        assert run(engine, lambda client: client.status()).num_active == 0
        socket.send_multipart([b"wrong", b"\xc1"])
        assert socket.poll(5000)
        assert decode(socket.recv(), Reply).refused == "wrong token"
    assert "malformed" in engine.log_tail()


def test_corrupted_weights_are_refused_and_the_previous_version_stays(engine: EngineProcess, channel: DiskChannel):
    good, torn = (channel.publish(v, weights_of(build_model())) for v in (20, 21))
    content = bytearray(Path(torn.path).read_bytes())
    content[-5] ^= 0xFF
    Path(torn.path).write_bytes(content)
    gone = replace(torn, path=torn.path + ".gone")

    async def work(client: EngineClient) -> Completion:
        await client.update_weights(good)
        for bad in (torn, gone):
            with pytest.raises(WeightsRefused, match="21"):
                await client.update_weights(bad)
        return await client.generate(PROMPT, PLAIN)

    assert run(engine, work).versions.tolist() == [20] * 10


def test_weights_of_another_model_are_refused_by_name(engine: EngineProcess, channel: DiskChannel):
    ref = channel.publish(1, weights_of(build_model("llama")))
    with pytest.raises(WeightsRefused, match="k_norm"):
        run(engine, lambda client: client.update_weights(ref))


def test_a_killed_engine_fails_what_is_pending_and_all_that_follows(tmp_path: Path):
    engine = start_in(tmp_path)
    channel = DiskChannel(tmp_path / "weights")
    ref = channel.publish(1, weights_of(build_model()))

    async def work(client: EngineClient) -> None:
        await client.update_weights(ref)
        pending = asyncio.gather(*(client.generate(PROMPT, LONG) for _ in range(3)), return_exceptions=True)
        await until_sampled(client, 5)
        os.kill(engine.pid, signal.SIGKILL)
        while engine.poll() is None:
            await asyncio.sleep(0.01)
        client.fail_all(EngineDied("killed"))
        assert all(isinstance(error, EngineDied) for error in await pending)
        with pytest.raises(EngineDied, match="killed"):
            await client.generate(PROMPT, PLAIN)

    run(engine, work)
    assert engine.stop() == -signal.SIGKILL


def test_a_silent_engine_times_out_by_name(engine: EngineProcess):
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=r"'torch' at tcp://127.0.0.1:\d+ did not answer status within 0.2 s"):
            run(engine, lambda client: client.status(), timeout_s=0.2)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert run(engine, lambda client: client.status()).num_active == 0


def test_the_server_exits_when_its_parent_dies(tmp_path: Path):
    settings_in(tmp_path)
    parent = (
        "import os; from pathlib import Path; from headway.engine.messages import EngineSettings; "
        "from headway.engine.process import start_engine; "
        f"e = start_engine(EngineSettings(config={str(tmp_path)!r}, max_slots=1, max_length=8), "
        f"log_path=Path({str(tmp_path / 'engine.log')!r})); print(e.pid, flush=True); os._exit(1)"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, check=False).stdout)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "the server outlived its parent by 10 s"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_cannot_start_shows_why(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    settings = EngineSettings(config=str(tmp_path), max_slots=1, max_length=8)
    with pytest.raises(RuntimeError, match=r"exited with code 1[\s\S]*'gpt2' is not supported"):
        start_engine(settings, log_path=tmp_path / "engine.log")
