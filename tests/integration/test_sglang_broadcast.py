"""`weights = "collective"` with SGLang, against a server made from its source's behavior: not yet a real one.

The fake's ranks are processes of their own, which join torch groups over gloo just as SGLang's do.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_sglang import FakeSglang, Unsuccessful
from harness import KEY, MAX_LENGTH, broadcasts, build
from runs import ledger, records, train
from tiny_models import logprobs_by_transformers

from headway.engine.messages import EngineSettings
from headway.engine.sglang import SglangEngine
from headway.engine.sglang_server import client_options
from headway.models.loading import named_weights
from headway.protocols import EngineDied, WeightsRefused
from headway.types import Sampling
from headway.weights import CollectiveChannel
from headway.weights.servers import EMBEDDING, HEAD, ServerSender

torch.set_num_threads(1)

PROMPT = np.array([4, 5, 6, 7], np.int32)
LONG = Sampling(max_tokens=400, seed=7, temperature=0.8)
WEIGHTS = [named_weights(build(seed=seed)) for seed in range(3)]
UPDATE = "/update_weights_from_distributed"

Serve = Callable[..., FakeSglang]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build().save_pretrained(path)
    return path


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """Starts a fake server; all are ended with the test."""
    servers: list[FakeSglang] = []

    def start(**options: Any) -> FakeSglang:
        servers.append(FakeSglang(folder, key=KEY, max_length=MAX_LENGTH, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def client_of(server: FakeSglang, folder: Path, *, timeout_s: float = 20.0, **options: Any) -> SglangEngine:
    settings = EngineSettings(config=str(folder), max_slots=4, max_length=MAX_LENGTH)
    return SglangEngine(server.url, key=KEY, place=folder, **client_options(settings, server.url, timeout_s) | options)


def held(server: FakeSglang) -> dict[str, torch.Tensor]:
    """What the server loads from now on."""
    loaded: dict[str, torch.Tensor] = {}
    load = server._engine.load

    def spy(tensors: Any, version: int) -> None:
        loaded.clear()
        loaded.update(tensors)
        load(tensors, version)

    server._engine.load = spy
    return loaded


async def deliver(channel: CollectiveChannel, version: int, *engines: SglangEngine) -> list[Any]:
    ref = channel.publish(version, WEIGHTS[version % len(WEIGHTS)])
    return await asyncio.gather(*(channel.deliver(ref, engine) for engine in engines), return_exceptions=True)


def bodies(server: FakeSglang, path: str) -> list[Any]:
    return [body for called, body in server.log if called == path]


def test_two_servers_take_a_version_bit_by_bit_in_one_round_and_keep_their_group(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.engine.sglang_weights.PART_BYTES", 40_000)
    said: list[str] = []
    servers, channel = (serve(), serve(has_sessions=False)), broadcasts(say=said.append)
    loaded = [held(server) for server in servers]

    async def work() -> None:
        engines = [client_of(server, folder) for server in servers]
        for version in range(3):
            assert await deliver(channel, version, *engines) == [version] * 2
            expected = WEIGHTS[version] | {HEAD: WEIGHTS[version][EMBEDDING]}
            for tensors in loaded:
                assert tensors.keys() == expected.keys()
                assert all(torch.equal(tensors[name], expected[name]) for name in expected)

    asyncio.run(work())
    channel.close()
    assert not said
    ranks = []
    for server in servers:
        (join,) = bodies(server, "/init_weights_update_group")  # once for three versions
        ranks.append(join["rank_offset"])
        assert (join["world_size"], join["backend"], join["master_address"]) == (3, "gloo", "127.0.0.1")
        parts = bodies(server, UPDATE)
        per_version = len(parts) // 3
        assert per_version > 2
        for i, part in enumerate(parts, start=1):
            is_last = i % per_version == 0
            assert part["flush_cache"] == is_last and part["group_name"] == join["group_name"]
            assert part.get("weight_version") == (str(i // per_version - 1) if is_last else None)
    assert sorted(ranks) == [1, 2]
    opened = [path for path, _ in servers[0].log if path in ("/begin_weight_update", "/end_weight_update")]
    assert opened == ["/begin_weight_update", "/end_weight_update"] * 3


def test_each_rank_of_a_server_is_a_rank_of_the_group(serve: Serve, folder: Path):
    servers, channel = (serve(num_ranks=2), serve(num_ranks=2)), broadcasts(width=2)

    async def work() -> list[Any]:
        return await deliver(channel, 0, *(client_of(server, folder, num_ranks=2) for server in servers))

    assert asyncio.run(work()) == [0, 0]
    channel.close()
    joins = [bodies(server, "/init_weights_update_group")[0] for server in servers]
    assert sorted(join["rank_offset"] for join in joins) == [1, 3] and joins[0]["world_size"] == 5


def test_a_server_of_other_ranks_than_counted_on_is_refused_by_name_before_it_is_paused(serve: Serve, folder: Path):
    server, channel = serve(num_ranks=2), broadcasts(timeout_s=0.5)
    (refusal,) = asyncio.run(deliver(channel, 0, client_of(server, folder)))
    channel.close()
    assert isinstance(refusal, WeightsRefused) and "tp_size 2" in str(refusal)
    assert "/pause_generation" not in [path for path, _ in server.log]


def test_a_server_that_dies_in_mid_broadcast_is_lost_and_the_others_meet_again(serve: Serve, folder: Path):
    said: list[str] = []
    first, dying, second = serve(), serve(), serve()
    channel, loaded = broadcasts(say=said.append), held(second)

    async def work() -> list[Any]:
        engines = [client_of(server, folder) for server in (first, dying, second)]
        assert await deliver(channel, 0, *engines) == [0] * 3
        dying.dies_after = 5
        outcomes = await deliver(channel, 1, *engines)
        assert [engine.is_lost for engine in engines] == [False, True, False]
        assert await deliver(channel, 2, engines[0], engines[2]) == [2, 2]
        return outcomes

    begun = time.monotonic()
    outcomes = asyncio.run(work())
    channel.close()
    assert time.monotonic() - begun < 20
    assert outcomes[0] == outcomes[2] == 1 and isinstance(outcomes[1], EngineDied)
    assert any("the broadcast of version 1 broke" in line for line in said)
    assert torch.equal(loaded[EMBEDDING], WEIGHTS[2][EMBEDDING])


class Breaking(ServerSender):
    """Sends some tensors of its second version, then none, once."""

    num_sent = 0

    def send(self, image: Any, layout: Any, meeting: Any) -> None:
        self.num_sent += 1
        if self.num_sent == 2:
            some = dict(list(layout.slots.items())[:4])
            super().send(image, type(layout)(some, layout.header_size, layout.size), meeting)
            self.part()
            raise RuntimeError("the network is gone")
        super().send(image, layout, meeting)


def test_nothing_is_generated_from_half_a_version(serve: Serve, folder: Path):
    said: list[str] = []
    server = serve()
    channel = CollectiveChannel(dtype=None, timeout_s=20, say=said.append, sender=Breaking)

    async def work() -> Any:
        engine = client_of(server, folder)
        assert await deliver(channel, 0, engine) == [0]
        pending = asyncio.ensure_future(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.1)
        assert await deliver(channel, 1, engine) == [1]
        return await pending

    answer = asyncio.run(work())
    channel.close()
    assert "the broadcast of version 1 broke: the network is gone" in said
    assert any("Failed to receive weights" in line and line.endswith("forming the group again") for line in said)
    assert server.num_torn_steps == 0
    taken = int((answer.versions == 0).sum())
    assert answer.versions.tolist() == [0] * taken + [1] * (LONG.max_tokens - taken)
    after = logprobs_by_transformers(build(seed=1), PROMPT, answer.token_ids, LONG.temperature)
    expected = after.gather(-1, torch.from_numpy(answer.token_ids)[:, None].long())[:, 0]
    torch.testing.assert_close(torch.from_numpy(answer.logprobs[taken:]), expected[taken:], atol=1e-4, rtol=0)
    paths = [path for path, _ in server.log if path != "/generate"]
    assert paths.count("/continue_generation") == 2 and paths[-1] == "/continue_generation"


def test_a_server_that_waits_for_a_whole_version_hands_back_what_it_has_when_it_is_interrupted(
    serve: Serve, folder: Path
):
    channel = CollectiveChannel(dtype=None, timeout_s=20, say=lambda line: None, sender=Breaking)

    async def whole_answer(engine: SglangEngine) -> int:
        num = 0
        while num < LONG.max_tokens:
            so_far = np.concatenate([PROMPT, np.full(num, 4, np.int32)])
            part = await engine.generate(so_far, replace(LONG, max_tokens=LONG.max_tokens - num))
            num += len(part.token_ids)
        return num

    async def work() -> None:
        engine = client_of(serve(), folder, on_update="interrupt")
        assert await deliver(channel, 0, engine) == [0]
        pending = asyncio.ensure_future(whole_answer(engine))  # asks again at once, also between the two rounds
        await asyncio.sleep(0.1)
        assert await deliver(channel, 1, engine) == [1]
        assert await pending == LONG.max_tokens

    asyncio.run(work())
    channel.close()


def test_a_server_that_cannot_load_what_it_received_stays_paused_and_counts_as_lost_with_its_own_words(
    serve: Serve, folder: Path
):
    server, channel = serve(), broadcasts(say=lambda line: None)

    async def work() -> Any:
        expected = client_options(EngineSettings(config=str(folder), max_slots=1, max_length=9), "", 1.0)["expected"]
        engine = client_of(server, folder, expected={**expected, "unexpected_name": (2,)})
        ref = channel.publish(0, WEIGHTS[0] | {"unexpected_name": torch.zeros(2)})
        with pytest.raises(EngineDied, match=r"3 broadcasts in a row broke off.*unexpected_name.*discard the whole"):
            await channel.deliver(ref, engine)

    asyncio.run(work())
    channel.close()
    assert len(bodies(server, UPDATE)) == 3 and not bodies(server, "/continue_generation")


def test_a_server_that_never_joins_holds_up_the_others_for_one_timeout_and_runs_into_its_own(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    stuck, healthy, channel = serve(), serve(), broadcasts(timeout_s=2.0, say=lambda line: None)
    warm = broadcasts()

    async def never(body: Any) -> Any:
        await stuck._stopped.wait()
        raise ConnectionError

    monkeypatch.setattr(stuck, "_init_weights_update_group", never)

    async def work() -> None:
        engines = client_of(stuck, folder, timeout_s=4.0), client_of(healthy, folder)
        assert await deliver(warm, 0, engines[1]) == [0]  # its rank has started
        begun = time.monotonic()
        outcomes = await deliver(channel, 1, *engines)
        assert isinstance(outcomes[0], TimeoutError) and outcomes[1] == 1
        assert time.monotonic() - begun < 12

    asyncio.run(work())
    channel.close()
    warm.close()


def test_what_is_not_finite_is_never_published_to_servers():
    channel = broadcasts()
    with pytest.raises(WeightsRefused, match=r"'b' holds values that are not finite"):
        channel.publish(0, {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])})
    channel.close()


def joined_run(server: FakeSglang, run: Path, model: Path) -> str:
    """Five steps with a server that is joined; what was printed."""
    settings = {"engine": "sglang", "weights": "collective", "num_steps": 5, "evaluation__every": 0}
    try:
        done = train(run, model, engines__url=server.url, engines__on_update="recompute", **settings)
    finally:
        server.stop()
    assert ledger(run)["samples"]["trained"] == 5 * 16
    assert [step["step"] for step in records(run, "step")] == list(range(5))
    assert not bodies(server, "/update_weights_from_disk") and server.num_torn_steps == 0
    return " ".join((done.stdout + done.stderr).split())


def test_a_whole_run_gives_a_joined_server_its_weights_by_broadcast_and_its_ledger_adds_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_ENGINE_KEY", KEY)
    server = FakeSglang(model, key=KEY).start()
    joined_run(server, tmp_path / "run", model)
    assert len(bodies(server, "/init_weights_update_group")) == 1
    assert [body["weight_version"] for body in bodies(server, UPDATE)] == [str(version) for version in range(6)]


def test_a_joined_server_that_fails_three_rounds_is_joined_again_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_ENGINE_KEY", KEY)
    server = FakeSglang(model, key=KEY).start()
    update, failures = server._update_weights_from_distributed, [3, 4, 5]

    async def fail(body: Any) -> Any:
        if len(bodies(server, UPDATE)) in failures:
            server._received = {"": None}
            raise Unsuccessful("Failed to receive weights: out of memory")
        return await update(body)

    monkeypatch.setattr(server, "_update_weights_from_distributed", fail)
    printed = joined_run(server, tmp_path / "run", model)
    assert "forming the group again" in printed and "restarting it" in printed
    assert records(tmp_path / "run", "step")[-1]["num_restarts"] == 1
    paths = [path for path, _ in server.log]
    broken = [i for i, path in enumerate(paths) if path == UPDATE][2:5]
    assert "/continue_generation" not in paths[broken[0] : broken[2]]
