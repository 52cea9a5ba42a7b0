"""The contract of weight channels: versions arrive bit for bit or are refused by name, and the previous one stays."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from channel_harness import KINDS, Harness, make, same, tensors

from headway.config import ConfigError, parse_config
from headway.runtime.channels import broadcast_backend, check_channel, served_dtype
from headway.types import WeightRef


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = make(request.param, tmp_path, [])
    yield harness
    harness.channel.close()


def publish(harness: Harness, version: int) -> WeightRef:
    return harness.channel.publish(version, tensors(version))


def test_every_version_arrives_bit_for_bit(harness: Harness):
    for version in range(5):
        ref = publish(harness, version)
        assert ref.version == version == harness.deliver(ref)
        assert same(harness.engine.held, tensors(version))


def test_not_a_number_and_minus_zero_travel_unchanged(harness: Harness):
    strange = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    for version, values in enumerate((torch.zeros(4), strange, strange.flip(0))):
        harness.deliver(harness.channel.publish(version, {"a": values}))
        assert torch.equal(harness.engine.held["a"].view(torch.int32), values.view(torch.int32))


def test_parameters_that_change_in_place_after_publishing_do_not_reach_the_engine(harness: Harness):
    layer = torch.nn.Linear(3, 2)
    for version in range(3):
        before = layer.weight.detach().clone()
        ref = harness.channel.publish(version, dict(layer.named_parameters()))
        with torch.no_grad():
            layer.weight.add_(1)
        harness.deliver(ref)
        assert torch.equal(harness.engine.held["weight"], before)
        assert not harness.engine.held["weight"].requires_grad


def test_another_version_than_promised_is_refused_and_the_previous_one_stays(harness: Harness):
    harness.deliver(publish(harness, 3))
    ref = publish(harness, 4)
    assert "version 5 of the weights refused" in harness.refusal(replace(ref, version=5))
    assert harness.engine.version == 3 and same(harness.engine.held, tensors(3))
    assert harness.deliver(ref) == 4


def test_another_checksum_than_promised_is_refused(harness: Harness):
    harness.deliver(publish(harness, 3))
    ref = publish(harness, 4)
    assert f"its checksum is {ref.checksum}, not 0123" in harness.refusal(replace(ref, checksum="0123"))
    assert harness.engine.version == 3 and same(harness.engine.held, tensors(3))
    assert harness.deliver(ref) == 4
    assert same(harness.engine.held, tensors(4))


def test_a_damaged_version_is_refused_by_name_and_the_previous_one_stays(harness: Harness):
    harness.deliver(publish(harness, 3))
    ref = publish(harness, 4)
    harness.damage(ref)
    refusal = harness.refusal(ref)
    assert (
        "version 4 of the weights refused" in refusal
        and "checksum" in refusal
        and ref.path.partition("?")[0] in refusal
    )
    assert harness.engine.version == 3 and same(harness.engine.held, tensors(3))


def test_a_version_that_is_cut_short_is_refused(harness: Harness):
    harness.deliver(publish(harness, 3))
    ref = publish(harness, 4)
    harness.cut(ref)
    assert "version 4 of the weights refused" in harness.refusal(ref)
    assert harness.engine.version == 3 and same(harness.engine.held, tensors(3))


def test_a_dtype_without_a_name_is_refused(harness: Harness):
    with pytest.raises(ValueError, match=r"'z' has dtype torch.complex64"):
        harness.channel.publish(0, {"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "disk"])
def test_a_changed_layout_is_refused_by_name(kind: str, tmp_path: Path):
    harness = make(kind, tmp_path, [])
    harness.deliver(publish(harness, 0))
    changed = tensors(1) | {"embed.weight": torch.zeros(7, 6)}
    with pytest.raises(ValueError, match=r"'embed.weight' was torch.float32 \[7, 5\], now torch.float32 \[7, 6\]"):
        harness.channel.publish(1, changed)
    harness.deliver(publish(harness, 2))
    assert same(harness.engine.held, tensors(2))
    harness.channel.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "disk"])
def test_a_version_must_grow(kind: str, tmp_path: Path):
    harness = make(kind, tmp_path, [])
    publish(harness, 3)
    with pytest.raises(ValueError, match="version 3 published after version 3"):
        publish(harness, 3)
    harness.channel.close()


@pytest.mark.parametrize(("engine", "weights"), [("vllm", "delta"), ("vllm", "collective"), ("sglang", "delta")])
def test_a_channel_that_a_server_cannot_take_is_refused_before_the_run(engine: str, weights: str):
    with pytest.raises(ConfigError, match=rf'weights = "{weights}" needs another engine.*"{engine}" takes "memory" or'):
        check_channel(parse_config({"engine": engine, "weights": weights}))
    check_channel(parse_config({"engine": "sglang", "weights": "collective"}))


def test_a_broadcast_goes_from_gpu_to_gpu_only_where_nobody_shares_one():
    assert broadcast_backend("cuda:0", ["cuda:1"]) == broadcast_backend("cuda:0", ["cuda:1", "cuda:2"]) == "nccl"
    assert (
        broadcast_backend("cuda:0", ["cuda:1", "cuda:1"]) == broadcast_backend("cuda:0", ["cuda:1", "cuda:0"]) == "gloo"
    )
    assert broadcast_backend("cuda", ["cuda:0"]) == broadcast_backend("cuda", ["cuda"]) == "gloo"
    assert broadcast_backend("cuda:0", ["cuda:0"]) == broadcast_backend("cuda", ["cpu"]) == "gloo"
    assert broadcast_backend("cuda:0", ["cuda:1,2", "cuda:3,4"]) == "nccl"
    assert broadcast_backend("cuda:0", ["cuda:1,2", "cuda:2,3"]) == "gloo"
    assert broadcast_backend("cpu", ["cpu"]) == broadcast_backend("cpu", ["cuda"]) == "gloo"


def test_what_travels_is_what_the_engines_compute_with():
    assert served_dtype(parse_config({"engines": {"device": "cpu"}})) == torch.float32
    assert served_dtype(parse_config({"engines": {"round_weights": "bfloat16"}})) == torch.bfloat16
    assert served_dtype(parse_config({"model": {"dtype": "bfloat16"}})) == torch.bfloat16
