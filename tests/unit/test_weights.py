"""Channels carry tensors bit for bit, keep the previous version, and refuse by name what did not arrive whole."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.protocols import WeightChannel, WeightsRefused
from headway.types import WeightRef
from headway.weights import DiskChannel, MemoryChannel, memory, read_weights

Make = Callable[[], WeightChannel]


@pytest.fixture(params=[DiskChannel, MemoryChannel])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightChannel]:
    channel = request.param(tmp_path)
    yield channel
    channel.close()


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """All the shapes and dtypes that models use, and one tensor that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "half": torch.randn(3, generator=generator).to(torch.float16),
        "scale": torch.tensor(1.5 + seed),
        "nothing": torch.empty(0, 4),
        "counts": torch.arange(3) + seed,
        "flag": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 6, generator=generator).T,
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and torch.equal(left[k], right[k])
        for k in left
    )


def test_every_version_arrives_bit_for_bit(channel: WeightChannel):
    for version in range(5):
        ref = channel.publish(version, tensors(version))
        assert ref.version == version
        assert same(read_weights(ref), tensors(version))


def test_the_previous_version_stays_readable(channel: WeightChannel):
    refs = [channel.publish(version, tensors(version)) for version in range(4)]
    assert same(read_weights(refs[2]), tensors(2))
    assert same(read_weights(refs[3]), tensors(3))
    with pytest.raises(WeightsRefused, match="version 1 of the weights refused"):
        read_weights(refs[1])


def test_the_file_opens_in_safetensors_itself(channel: WeightChannel):
    ref = channel.publish(3, tensors())
    assert same(load_file(ref.path), tensors())


def test_not_a_number_travels_unchanged(channel: WeightChannel):
    ref = channel.publish(0, {"a": torch.tensor([float("nan"), float("inf"), -0.0])})
    assert torch.equal(
        read_weights(ref)["a"].view(torch.int32), torch.tensor([float("nan"), float("inf"), -0.0]).view(torch.int32)
    )


def test_parameters_that_require_grad_are_published(channel: WeightChannel):
    layer = torch.nn.Linear(3, 2)
    arrived = read_weights(channel.publish(0, dict(layer.named_parameters())))
    assert torch.equal(arrived["weight"], layer.weight) and not arrived["weight"].requires_grad


def test_another_version_than_promised_is_refused(channel: WeightChannel):
    ref = channel.publish(4, tensors())
    with pytest.raises(WeightsRefused, match=r"version 5 of the weights refused: .*: it holds version 4"):
        read_weights(replace(ref, version=5))


def test_another_checksum_than_promised_is_refused(channel: WeightChannel):
    ref = channel.publish(4, tensors())
    with pytest.raises(WeightsRefused, match=f"its checksum is {ref.checksum}, not 0123"):
        read_weights(replace(ref, checksum="0123"))
    assert same(read_weights(ref), tensors())


def test_a_missing_file_is_refused(channel: WeightChannel):
    ref = channel.publish(4, tensors())
    Path(ref.path).unlink()
    with pytest.raises(WeightsRefused, match="cannot be read: No such file"):
        read_weights(ref)


def test_a_truncated_file_is_refused(tmp_path: Path):
    ref = DiskChannel(tmp_path).publish(4, tensors())
    whole = Path(ref.path).read_bytes()
    for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        Path(ref.path).write_bytes(whole[:length])
        with pytest.raises(WeightsRefused, match=r"v4\.safetensors"):
            read_weights(ref)


def test_trailing_bytes_are_refused(tmp_path: Path):
    ref = DiskChannel(tmp_path).publish(4, tensors())
    with open(ref.path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(WeightsRefused, match="overlong"):
        read_weights(ref)


class BrokenCopy(RuntimeError):
    pass


def test_a_version_half_written_in_memory_is_refused_and_the_previous_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    channel = MemoryChannel(tmp_path)
    refs = [channel.publish(version, tensors(version)) for version in range(2)]
    copy = memory._copy
    left = 3

    def failing(*args) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise BrokenCopy
        copy(*args)

    monkeypatch.setattr(memory, "_copy", failing)
    with pytest.raises(BrokenCopy):
        channel.publish(2, tensors(2))
    with pytest.raises(WeightsRefused, match="half-written"):
        read_weights(WeightRef(2, refs[0].path, refs[0].checksum))
    assert same(read_weights(refs[1]), tensors(1))
    monkeypatch.undo()
    assert same(read_weights(channel.publish(3, tensors(3))), tensors(3))
    assert same(read_weights(refs[1]), tensors(1))
    channel.close()


def test_a_failed_publish_to_disk_leaves_the_previous_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    channel = DiskChannel(tmp_path)
    ref = channel.publish(0, tensors(0))

    def failing(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="No space left"):
        channel.publish(1, tensors(1))
    monkeypatch.undo()
    assert same(read_weights(ref), tensors(0))
    assert not (tmp_path / "v1.safetensors").exists()
    channel.publish(2, tensors(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v0.safetensors", "v2.safetensors"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"embed.weight": torch.zeros(7, 6)}, r"'embed.weight' was torch.float32 \[7, 5\], now torch.float32 \[7, 6\]"),
        ({"norm.weight": torch.zeros(5)}, r"'norm.weight' was torch.bfloat16 \[5\], now torch.float32 \[5\]"),
        ({"more": torch.zeros(1)}, "'more' is new"),
    ],
)
def test_memory_refuses_a_changed_layout_by_name(tmp_path: Path, changed: dict[str, Tensor], message: str):
    channel = MemoryChannel(tmp_path)
    ref = channel.publish(0, tensors())
    with pytest.raises(ValueError, match=message):
        channel.publish(1, tensors() | changed)
    assert same(read_weights(ref), tensors())
    channel.close()


def test_memory_refuses_a_version_that_does_not_grow(tmp_path: Path):
    channel = MemoryChannel(tmp_path)
    channel.publish(3, tensors())
    with pytest.raises(ValueError, match="version 3 published after version 3"):
        channel.publish(3, tensors())
    channel.close()


def test_a_dtype_without_a_name_is_refused(channel: WeightChannel):
    with pytest.raises(ValueError, match=r"'z' has dtype torch.complex64"):
        channel.publish(0, {"z": torch.zeros(2, dtype=torch.complex64)})


def test_writing_to_what_was_read_does_not_reach_the_file(channel: WeightChannel):
    ref = channel.publish(0, tensors())
    before = Path(ref.path).read_bytes()
    read_weights(ref)["embed.weight"].zero_()
    assert Path(ref.path).read_bytes() == before


def test_memory_is_private_to_the_user_and_gone_after_close(tmp_path: Path):
    channel = MemoryChannel(tmp_path)
    ref = channel.publish(0, tensors())
    folder = Path(ref.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    channel.close()
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_does_not_fit_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_free_bytes", lambda directory: 100)
    with pytest.raises(OSError, match=r"two copies of the weights \([\d,]+ bytes\) do not fit in "):
        MemoryChannel(tmp_path).publish(0, tensors())
    assert list(tmp_path.iterdir()) == []


PUBLISHER = """
import sys, time
from pathlib import Path
import torch
from headway.weights import MemoryChannel
channel = MemoryChannel(Path(sys.argv[1]))
print(channel.publish(0, {"a": torch.ones(4)}).path, flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_holds_is_not(tmp_path: Path):
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert publisher.stdout is not None
    path = Path(publisher.stdout.readline().strip())
    MemoryChannel(tmp_path).close()
    assert path.exists()
    publisher.kill()
    publisher.wait()
    publisher.stdout.close()
    assert path.exists()
    MemoryChannel(tmp_path).close()
    assert not path.parent.exists()


READER = """
import sys
from headway.types import WeightRef
from headway.weights import read_weights
for line in sys.stdin:
    version, path, checksum = line.split()
    tensors = read_weights(WeightRef(int(version), path, checksum))
    values = {float(v) for t in tensors.values() for v in (t.min(), t.max())}
    print(*values, flush=True)
"""


def test_another_process_reads_every_version_as_it_is_published(tmp_path: Path):
    reader = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert reader.stdin is not None and reader.stdout is not None
    channels: list[WeightChannel] = [MemoryChannel(tmp_path), DiskChannel(tmp_path / "disk")]
    for version in range(8):
        for channel in channels:
            value = float(version)
            ref = channel.publish(version, {"a": torch.full((100, 50), value), "b": torch.full((3,), value)})
            reader.stdin.write(f"{ref.version} {ref.path} {ref.checksum}\n")
            assert reader.stdout.readline() == f"{value}\n"
    reader.stdin.close()
    reader.stdout.close()
    assert reader.wait() == 0
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("kind", [DiskChannel, MemoryChannel])
def test_a_version_that_an_engine_lags_at_stays_readable_as_long_as_it_is_in_use(kind: type, tmp_path: Path):
    channel = kind(tmp_path)
    refs = [channel.publish(0, tensors(0))]
    for version in range(1, 5):
        refs.append(channel.publish(version, tensors(version), in_use={0}))
        assert same(read_weights(refs[0]), tensors(0))
        assert same(read_weights(refs[version - 1]), tensors(version - 1))
    for version in (5, 6, 7):
        refs.append(channel.publish(version, tensors(version)))
    with pytest.raises(WeightsRefused):
        read_weights(refs[0])
    assert same(read_weights(refs[6]), tensors(6)) and same(read_weights(refs[7]), tensors(7))
    channel.close()


def test_memory_grows_by_what_lags_and_no_more(tmp_path: Path):
    channel = MemoryChannel(tmp_path)
    paths = {channel.publish(version, tensors(version), in_use={0} if version else ()).path for version in range(9)}
    assert len(paths) == 3
    channel.close()
