"""What a weight update costs against copying the same bytes, side by side.

    python scripts/bench_weights.py [--rounds 9] [--layers 30]

Random float32 tensors in the shapes of SmolLM2-135M. Prints a table of medians, then one JSON line.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headway.types import WeightRef
from headway.weights import DiskChannel, MemoryChannel, read_weights

HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 576, 1536, 192, 49152


def smollm2_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter; 30 layers make 134.5M parameters."""
    layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return shapes | {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}


def memmove_all(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        ctypes.memmove(targets[name].data_ptr(), source.data_ptr(), source.nbytes)


def copy_all(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)


def timed(times: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)


def measure(tensors: dict[str, Tensor], rounds: int, folder: Path) -> dict[str, float]:
    """Milliseconds, medians over rounds that interleave copying, publishing and reading."""
    targets = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    times: dict[str, list[float]] = {}
    for kind, channel, num in (("memory", MemoryChannel(), rounds), ("disk", DiskChannel(folder), 3)):
        refs: list[WeightRef] = []
        for version in range(-2, num):
            if version == 0:
                times = {name: values for name, values in times.items() if not name.startswith(kind)}
            timed(times, "copy by Tensor.copy_", lambda: copy_all(targets, tensors))
            timed(times, "copy", lambda: memmove_all(targets, tensors))
            timed(times, f"{kind} publish", lambda v=version + 2, c=channel, r=refs: r.append(c.publish(v, tensors)))
            timed(times, f"{kind} read", lambda r=refs: read_weights(r[-1]))
        channel.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the copies to compare with run in one thread, as publishing does
    tensors = {name: torch.randn(shape) for name, shape in smollm2_shapes(options.layers).items()}
    with tempfile.TemporaryDirectory() as folder:
        result = measure(tensors, options.rounds, Path(folder))
    num_bytes = sum(t.nbytes for t in tensors.values())
    copy, both = result["copy"], result["memory publish"] + result["memory read"]
    print(f"{num_bytes / 1e6:.0f} MB in {len(tensors)} tensors, {options.rounds} rounds")
    for name, ms in {**result, "memory publish + read": both}.items():
        print(f"{name:22} {ms:8.1f} ms {num_bytes / ms / 1e6:6.1f} GB/s {ms / copy:6.2f} × copy")
    ratios = {"publish_over_copy": result["memory publish"] / copy, "publish_read_over_copy": both / copy}
    print(json.dumps({"bench": "weights", "num_bytes": num_bytes, "ms": result, **ratios}))


if __name__ == "__main__":
    main()
