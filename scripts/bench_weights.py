"""What a weight update costs against copying the same bytes, side by side.

    python scripts/bench_weights.py [--rounds 9] [--layers 30]
    python scripts/bench_weights.py --model FOLDER --text FILE [--rates 1e-5 1e-6] [--steps 3]

The first takes random float32 tensors in the shapes of SmolLM2-135M. The second trains a model by AdamW (float32 master
weights, a line of text a row) and sends every version but the first through each channel, as float32 and as bfloat16.
Both print a table of medians, then one JSON line.
"""

import argparse
import asyncio
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.models.loading import load_causal_lm, load_tokenizer, named_weights
from headway.protocols import WeightChannel
from headway.types import WeightRef
from headway.weights import CollectiveChannel, DeltaChannel, DiskChannel, MemoryChannel, WeightReader, read_weights
from headway.weights.differences import words

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


class Receiving:
    """An engine that reads what it is given, and notes how long that took."""

    def __init__(self) -> None:
        self.reader, self.read_s = WeightReader(), 0.0

    async def status(self) -> None:
        """It is there."""

    async def update_weights(self, ref: WeightRef) -> None:
        begun = time.perf_counter()
        await asyncio.to_thread(self.reader.read, ref)
        self.read_s = time.perf_counter() - begun


def training(folder: Path, text: Path, rate: float, num_steps: int) -> Iterator[Mapping[str, Tensor]]:
    """The parameters after each AdamW step on two lines of text."""
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    lines = text.read_text().splitlines()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(num_steps):
        rows = [tokenizer(line)["input_ids"][:64] for line in lines[2 * step : 2 * step + 2]]
        ids = torch.tensor([row[: min(map(len, rows))] for row in rows])
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield named_weights(model)


def send(channel: WeightChannel, engine: Any, version: int, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """One version through a channel to one engine: seconds of both ends, and bytes where a file travels."""
    begun = time.perf_counter()
    ref = channel.publish(version, tensors)
    published = time.perf_counter()
    asyncio.run(channel.deliver(ref, engine))
    delivered = time.perf_counter()
    path = Path(ref.path)
    return {
        "num_bytes": float(path.stat().st_size if path.is_file() else sum(t.nbytes for t in tensors.values())),
        "publish_s": published - begun,
        "deliver_s": delivered - published,
        "read_s": engine.read_s,
    }


def measure_versions(options: argparse.Namespace, rate: float, place: Path) -> list[dict[str, Any]]:
    """Medians over the versions of one training run, a row for each dtype and channel."""
    channels: dict[tuple[str, torch.dtype], tuple[WeightChannel, Receiving]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = place / f"{rate}-{dtype}"
        made: dict[str, WeightChannel] = {
            "memory": MemoryChannel(),
            "disk": DiskChannel(folder / "disk"),
            "delta": DeltaChannel(folder / "delta", dtype=dtype, say=print),
            "collective": CollectiveChannel(dtype=dtype, timeout_s=120, say=print),
        }
        channels |= {(kind, dtype): (channel, Receiving()) for kind, channel in made.items()}
    found: dict[tuple[str, torch.dtype], list[dict[str, float]]] = {key: [] for key in channels}
    changed: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    last: dict[torch.dtype, Mapping[str, Tensor]] = {}
    for version, parameters in enumerate(training(options.model, options.text, rate, options.steps + 1)):
        for dtype in changed:
            tensors = {name: t.detach().to(dtype) for name, t in parameters.items()}
            if dtype in last:
                changed[dtype].append(share_changed(last[dtype], tensors))
            last[dtype] = {name: t.clone() for name, t in tensors.items()}
            for (kind, served), (channel, engine) in channels.items():
                if served == dtype:
                    sent = send(channel, engine, version, tensors)
                    found[kind, dtype] += [sent] if version else []  # the first goes whole through all of them
        print(f"learning rate {rate:g}: version {version} sent", flush=True)
    for channel, _ in channels.values():
        channel.close()
    return [
        {"rate": rate, "dtype": str(dtype).removeprefix("torch."), "channel": kind}
        | {"changed": statistics.median(changed[dtype])}
        | {name: statistics.median(sent[name] for sent in rows) for name in rows[0]}
        for (kind, dtype), rows in found.items()
    ]


def share_changed(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Share of elements whose bits are not the same."""
    counts = [(int((words(old[name]) != words(new[name])).sum()), new[name].numel()) for name in new]
    return sum(count for count, _ in counts) / sum(size for _, size in counts)


def print_versions(rows: list[dict[str, Any]]) -> None:
    print("| rate | served as | changed words | channel | MB | of a copy | publish s | read s | delivered s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        full = next(r for r in rows if (r["rate"], r["dtype"], r["channel"]) == (row["rate"], row["dtype"], "disk"))
        print(
            f"| {row['rate']:g} | {row['dtype']} | {row['changed']:.2%} | {row['channel']} "
            f"| {row['num_bytes'] / 1e6:.1f} | {row['num_bytes'] / full['num_bytes']:.1%} "
            f"| {row['publish_s']:.2f} | {row['read_s']:.2f} | {row['deliver_s']:.2f} |"
        )
    print(json.dumps({"bench": "weight versions", "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--model", type=Path, help="a model's folder, to be trained for real versions")
    parser.add_argument("--text", type=Path, help="a file of text to train on, a row each line")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-6])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the copies to compare with run in one thread, as publishing does
    if options.model:
        with tempfile.TemporaryDirectory() as folder:
            print_versions([row for rate in options.rates for row in measure_versions(options, rate, Path(folder))])
        return
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
