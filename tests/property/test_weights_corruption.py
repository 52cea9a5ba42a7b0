"""No flipped bit of a published version goes unnoticed."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.protocols import WeightsRefused
from headway.weights import DiskChannel, MemoryChannel, read_weights

TENSORS = {"layer.weight": torch.arange(12.0).view(3, 4), "layer.bias": torch.ones(3, dtype=torch.bfloat16)}


@pytest.mark.parametrize("kind", [DiskChannel, MemoryChannel])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused_by_name(kind: type, tmp_path: Path, place: float, bit: int):
    channel = kind(tmp_path)
    ref = channel.publish(7, TENSORS)
    with open(ref.path, "r+b") as file:
        data = bytearray(file.read())
        data[int(place * len(data))] ^= 1 << bit
        file.seek(0)
        file.write(data)
    with pytest.raises(WeightsRefused, match=f"version 7 of the weights refused: {ref.path}: it"):
        read_weights(ref)
    channel.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
)
def test_any_shapes_and_names_arrive(tmp_path: Path, shapes: dict[str, list[int]], dtype: torch.dtype):
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items() if name != "__metadata__"}
    channel = MemoryChannel(tmp_path)
    arrived = read_weights(channel.publish(0, tensors))
    assert arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    channel.close()
