"""Broadcasts: engines meet in rounds, a late or lost one holds up nobody, and a broken round is repeated."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from channel_harness import Reading, same, tensors

from headway.engine.http import BadAnswer, Http
from headway.engine.sglang_weights import SglangWeights
from headway.protocols import DeliveryFailed, EngineDied, WeightsRefused
from headway.types import WeightRef
from headway.weights import CollectiveChannel
from headway.weights.group import Meeting, listen
from headway.weights.servers import _place


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def channel(said: list[str]) -> Iterator[CollectiveChannel]:
    channel = CollectiveChannel(dtype=None, timeout_s=2, say=said.append)
    yield channel
    channel.close()


class Late(Reading):
    """Answers only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def status(self) -> None:
        await self.may_answer.wait()


class Dying(Reading):
    """Says that it is there, and is gone when the others meet."""

    async def update_weights(self, ref: WeightRef) -> None:
        raise EngineDied("exit -9")


async def deliver(channel: CollectiveChannel, ref: WeightRef, *engines: Any) -> list[Any]:
    return await asyncio.gather(*(channel.deliver(ref, engine) for engine in engines), return_exceptions=True)


async def bring(channel: CollectiveChannel, ref: WeightRef, engine: Any) -> int:
    return await channel.deliver(ref, engine)


def test_all_engines_take_a_version_in_one_round_and_keep_their_group(channel: CollectiveChannel, said: list[str]):
    engines = Reading(), Reading(), Reading()

    async def work() -> set[str]:
        keys = set()
        for version in range(3):
            ref = channel.publish(version, tensors(version))
            assert await deliver(channel, ref, *engines[version:], *engines[:version]) == [version] * 3
            assert all(same(engine.held, tensors(version)) for engine in engines)
            keys.add(channel._key)
        return keys

    assert len(asyncio.run(work())) == 1 and not said


def test_an_engine_that_does_not_answer_holds_up_nobody_and_gets_the_newest_version_later(
    channel: CollectiveChannel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.weights.collective._PATIENCE_S", 3.0)

    async def work() -> None:
        prompt, late = Reading(), Late()
        waiting = asyncio.ensure_future(bring(channel, channel.publish(0, tensors(0)), late))
        for version in (1, 2):
            ref = channel.publish(version, tensors(version))
            begun = time.monotonic()
            assert await deliver(channel, ref, prompt) == [version]
            # Only the first round waits for it.
            assert version == 1 or time.monotonic() - begun < 2.9
        late.may_answer.set()
        assert await waiting == 2 and same(late.held, tensors(2))

    asyncio.run(work())


def test_a_restarted_engine_joins_and_the_group_is_formed_anew(channel: CollectiveChannel):
    async def work() -> None:
        first, second, restarted = Reading(), Reading(), Reading()
        assert await deliver(channel, channel.publish(0, tensors(0)), first, second) == [0, 0]
        ref = channel.publish(1, tensors(1))
        assert await deliver(channel, ref, first) == [1]
        assert await deliver(channel, ref, restarted) == [1]
        assert await deliver(channel, channel.publish(2, tensors(2)), first, restarted) == [2, 2]
        assert same(first.held, tensors(2)) and same(restarted.held, tensors(2)) and same(second.held, tensors(0))

    asyncio.run(work())


def test_an_engine_that_dies_in_the_middle_breaks_one_round_and_the_others_meet_again(
    channel: CollectiveChannel, said: list[str]
):
    async def work() -> None:
        first, dying, second = Reading(), Dying(), Reading()
        begun = time.monotonic()
        outcomes = await deliver(channel, channel.publish(7, tensors(7)), first, dying, second)
        assert time.monotonic() - begun < 10
        assert [outcomes[0], outcomes[2]] == [7, 7] and isinstance(outcomes[1], EngineDied)
        assert same(first.held, tensors(7)) and same(second.held, tensors(7))

    asyncio.run(work())
    assert any("the broadcast of version 7 broke" in line for line in said)
    assert any("forming the group again" in line for line in said)


def test_an_engine_that_is_given_up_leaves_the_round_at_once(channel: CollectiveChannel):
    class Stuck(Reading):
        async def update_weights(self, ref: WeightRef) -> None:
            await asyncio.Event().wait()

    async def work() -> None:
        stuck, healthy = Stuck(), Reading()
        ref = channel.publish(0, tensors(0))
        delivery = asyncio.ensure_future(bring(channel, ref, stuck))
        other = asyncio.ensure_future(bring(channel, ref, healthy))
        await asyncio.sleep(0.3)
        delivery.cancel()  # its process is gone: the pool says so
        assert await asyncio.wait_for(other, 10) == 0 and same(healthy.held, tensors(0))

    asyncio.run(work())


def test_publishing_during_a_broadcast_disturbs_it_not(channel: CollectiveChannel):
    async def work() -> None:
        engine = Reading()
        delivery = asyncio.ensure_future(bring(channel, channel.publish(0, tensors(0)), engine))
        thread = threading.Thread(target=lambda: channel.publish(1, tensors(1)))
        thread.start()
        version = await delivery
        thread.join()
        assert same(engine.held, tensors(version))

    asyncio.run(work())


def test_a_meeting_survives_being_written_down():
    meeting = Meeting("gloo", "127.0.0.1", 4000, "ab12", 2, 3, 1_000, 30.0)
    assert Meeting.parse(meeting.url) == meeting


@pytest.mark.parametrize(
    "url",
    [
        "gloo://127.0.0.1:1/k",
        "gloo://127.0.0.1:1/k?rank=0&world=2&size=8&timeout_s=1",
        "gloo://127.0.0.1:1/k?rank=1&world=2&size=-8&timeout_s=1",
        "gloo://127.0.0.1/k?rank=1&world=2&size=8&timeout_s=1",
        "mpi://127.0.0.1:1/k?rank=1&world=2&size=8&timeout_s=1",
    ],
)
def test_what_is_no_meeting_is_refused_by_name(url: str):
    with pytest.raises(WeightsRefused, match=r"version 3 of the weights refused: .*it is no meeting of a group"):
        Reading().reader.read(WeightRef(3, url, ""))


@pytest.mark.parametrize("said", [None, b"", b'{"a": 1}', b'[["n", "float32", [-1.5], 4]]', b'[{"name": 3}]'])
def test_an_announcement_that_is_missing_or_makes_no_sense_breaks_the_round(said: bytes | None):
    store, port = listen("127.0.0.1", 1)
    meeting = Meeting("gloo", "127.0.0.1", port, "key", 1, 2, 8, 0.3)
    if said is not None:
        store.set(_place(meeting), said)
    weights, ref = SglangWeights(Http("http://127.0.0.1:1"), num_ranks=1), WeightRef(3, meeting.url, "")
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match=r"version 3 of the weights refused.*nobody says what will be sent"):
            asyncio.run(weights.announced(ref, meeting))
    with pytest.raises(BadAnswer, match="3 broadcasts in a row broke off"):
        asyncio.run(weights.announced(ref, meeting))
