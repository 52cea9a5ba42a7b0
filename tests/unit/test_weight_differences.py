"""Differences: bit-exact whatever the words, small where little changed, and a whole version where they are no use."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from channel_harness import Reading, make, same, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headway.protocols import DeliveryFailed
from headway.types import WeightRef
from headway.weights import DeltaChannel
from headway.weights.differences import apply, encode


@settings(max_examples=80, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64]), size=st.integers(1, 300))
def test_any_words_turn_into_any_others_bit_for_bit(data: st.DataObject, dtype: type, size: int):
    old = data.draw(arrays.arrays(dtype, size))
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=size))
    new = old.copy()
    new[places] = data.draw(arrays.arrays(dtype, len(places)))
    encoding, num_changed, payload = encode(old, new)
    assert num_changed == (old != new).sum()
    if num_changed:
        before = old.copy()
        assert np.array_equal(apply(old, encoding, num_changed, payload), new)
        assert np.array_equal(old, before)


def test_few_changes_travel_as_places_and_many_as_steps():
    old = np.random.default_rng(0).integers(-(2**15), 2**15, 100_000).astype(np.int16)
    few, many = old.copy(), old + 1
    few[::100] += 1
    encoding, num_changed, payload = encode(old, few)
    assert (encoding, num_changed) == ("sparse", 1000) and len(payload) < 500
    encoding, num_changed, payload = encode(old, many)
    assert (encoding, num_changed) == ("dense", 100_000) and len(payload) < 500


@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=60), encoding=st.sampled_from(["sparse", "dense"]), count=st.integers(0, 30))
def test_a_payload_that_is_no_difference_is_a_value_error(payload: bytes, encoding, count: int):
    with pytest.raises(ValueError):
        apply(np.zeros(16, np.int32), encoding, count, payload)


def test_a_small_step_in_bfloat16_is_a_small_fraction_of_a_copy(tmp_path: Path):
    weights = torch.randn(1000, 100) * 0.05
    channel = DeltaChannel(tmp_path, dtype=torch.bfloat16, say=print)
    channel.publish(0, {"w": weights})
    ref = channel.publish(1, {"w": weights + 1e-6 * torch.randn(1000, 100).sign()})
    assert Path(ref.path).stat().st_size < 0.02 * weights.numel() * 2


def test_what_is_served_in_bfloat16_arrives_rounded_once(tmp_path: Path):
    channel, engine = DeltaChannel(tmp_path, dtype=torch.bfloat16, say=print), Reading()
    for version in range(3):
        weights = {"w": torch.randn(20, 10), "count": torch.arange(3)}
        harness = make("delta", tmp_path, [])
        harness.channel, harness.engine = channel, engine
        harness.deliver(channel.publish(version, weights))
        assert same(engine.held, {"w": weights["w"].bfloat16(), "count": weights["count"]})


def test_an_engine_without_the_version_a_difference_starts_from_gets_the_whole_one_and_it_is_said(tmp_path: Path):
    said: list[str] = []
    harness = make("delta", tmp_path, said)
    for version in range(3):
        harness.deliver(harness.channel.publish(version, tensors(version)))
    assert not said
    harness.engine = Reading()  # restarted
    ref = harness.channel.publish(3, tensors(3))
    assert harness.deliver(ref) == 3 and same(harness.engine.held, tensors(3))
    (line,) = said
    assert "it starts from version 2, and this engine holds nothing; sending version 3 whole" in line
    harness.deliver(harness.channel.publish(4, tensors(4)))
    assert len(said) == 1 and same(harness.engine.held, tensors(4))
    late = harness.channel.publish(5, tensors(5))
    harness.channel.publish(6, tensors(6))
    (tmp_path / "v5-from-v4.delta").unlink()
    assert harness.deliver(late) == 6 and "cannot be read" in said[1] and "sending version 6 whole" in said[1]
    assert same(harness.engine.held, tensors(6))


def test_a_damaged_difference_is_replaced_by_the_whole_version_and_it_is_said(tmp_path: Path):
    said: list[str] = []
    harness = make("delta", tmp_path, said)
    for version in range(2):
        harness.deliver(harness.channel.publish(version, tensors(version)))
    ref = harness.channel.publish(2, tensors(2))
    harness.damage(ref)
    assert harness.deliver(ref) == 2 and same(harness.engine.held, tensors(2))
    assert "its checksum is" in said[0] and "sending version 2 whole" in said[0]


def test_a_difference_applied_to_other_weights_of_the_same_version_is_refused(tmp_path: Path):
    harness = make("delta", tmp_path, [])
    harness.deliver(harness.channel.publish(0, tensors(0)))
    harness.engine.reader._held = {**harness.engine.reader._held, "frozen": torch.zeros(3)}
    assert "it makes weights of digest" in harness.refusal(harness.channel.publish(1, tensors(1)))


def test_a_failed_publish_leaves_the_previous_version_to_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    harness = make("delta", tmp_path, [])
    for version in range(2):
        harness.deliver(harness.channel.publish(version, tensors(version)))

    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.weights.delta.write_whole", failing)
    with pytest.raises(OSError, match="No space left"):
        harness.channel.publish(2, tensors(2))
    monkeypatch.undo()
    harness.deliver(harness.channel.publish(3, tensors(3)))
    assert same(harness.engine.held, tensors(3))


def test_a_header_that_is_no_header_is_refused(tmp_path: Path):
    import xxhash

    from headway.types import WeightRef

    path = tmp_path / "v1-from-v0.delta"
    for data in (b"", b"HWDELTA1", b"HWDELTA1" + bytes(8), b"HWDELTA1" + b"\xff" * 8, b"x" * 40):
        path.write_bytes(data)
        ref = WeightRef(1, str(path), xxhash.xxh3_64_hexdigest(data))
        assert "its header is damaged" in make("delta", tmp_path / "other", []).refusal(ref)


def test_old_differences_are_removed(tmp_path: Path):
    channel = DeltaChannel(tmp_path, dtype=None, say=print)
    for version in range(6):
        channel.publish(version, tensors(version))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v0.safetensors", "v4-from-v3.delta", "v5-from-v4.delta"]


def test_what_an_engine_still_reads_is_not_removed(tmp_path: Path):
    channel = DeltaChannel(tmp_path, dtype=None, say=print)

    class Slow(Reading):
        """Reads a whole version for so long that four more are published and asked for whole."""

        async def update_weights(self, ref: WeightRef) -> None:
            if ref.path.endswith(".delta"):
                raise DeliveryFailed("it holds nothing")
            for version in range(3, 7):
                channel.publish(version, tensors(version), in_use=[2])
                channel.whole()
            await super().update_weights(ref)

    channel.publish(1, tensors(1))
    ref = channel.publish(2, tensors(2))
    engine: Any = Slow()
    assert asyncio.run(channel.deliver(ref, engine)) == 2 and same(engine.held, tensors(2))
    assert (tmp_path / "v2-from-v1.delta").exists() and not (tmp_path / "v3-from-v2.delta").exists()
    channel.publish(7, tensors(7))
    channel.whole()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("v6-from-v5.delta", "v6.safetensors", "v7-from-v6.delta", "v7.safetensors"),
    ]


class Rereading(Reading):
    """Holds nothing, and takes its time with whole versions: `midway` is what happens while it reads one."""

    def __init__(self, midway: Any) -> None:
        super().__init__()
        self.midway = midway

    async def update_weights(self, ref: WeightRef) -> None:
        if not ref.path.endswith(".delta"):
            await self.midway(ref)
        await super().update_weights(ref)


def test_a_whole_version_stays_while_an_engine_reads_it_and_goes_when_none_does(tmp_path: Path):
    channel = DeltaChannel(tmp_path, dtype=None, say=lambda line: None)
    newest = iter(range(1, 100))

    def publish() -> WeightRef:
        version = next(newest)
        return channel.publish(version, tensors(version))

    async def others_go_on(ref: WeightRef) -> None:
        for _ in range(4):
            publish()
            await asyncio.to_thread(channel.whole)
        assert Path(ref.path).exists()

    async def never_ends(ref: WeightRef) -> None:
        await asyncio.Event().wait()

    def to_engine(midway: Any) -> Any:
        engine: Any = Rereading(midway)
        return channel.deliver(publish(), engine)

    async def cancelled() -> None:
        delivery = asyncio.ensure_future(to_engine(never_ends))
        await asyncio.sleep(0.1)
        delivery.cancel()
        await asyncio.gather(delivery, return_exceptions=True)

    channel.publish(0, tensors(0))
    assert asyncio.run(to_engine(others_go_on)) == 1
    asyncio.run(cancelled())
    for _ in range(4):
        publish()
        channel.whole()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
