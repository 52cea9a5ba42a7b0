"""Every candidate of the fused log-prob + entropy head against plain `log_softmax`: time and peak memory of forward
and backward.

    python scripts/bench_head.py [--tokens 2048] [--hidden 576] [--repeats 5] [--threads 2] [--device cpu]
                                 [--dtype float32] [--heads eager compiled]

Times are taken in turns in one process (median). Peak memory is what a route adds on top of its inputs, the
gradients it must return included: on CPU the high-water mark of resident memory in a process per route (Linux), on
CUDA `torch.cuda.max_memory_allocated`. A first round, in which compiled candidates compile, is not counted. Prints a
table, then one JSON line.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from headway.models.head import token_logprobs
from headway.models.tiles import HEADS

VOCABULARIES = (151_936, 49_152)
MIB = 2**20
COLUMNS = {
    "vocabulary": 10,
    "route": 14,
    "seconds": 8,
    "of plain": 9,
    "peak MiB": 9,
    "of  plain": 9,
    "gradients MiB": 14,
    "max difference": 15,
}
Route = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T.to(hidden.dtype)).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets.unsqueeze(-1)).squeeze(-1), entropy


ROUTES: dict[str, Route] = {
    "plain": plain,
    **{name: partial(token_logprobs, tiles=tiles) for name, tiles in HEADS.items()},
}


def make_inputs(tokens: int, hidden_size: int, vocabulary: int, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Hidden states in `--dtype`, float32 weights, as in training."""
    torch.manual_seed(0)
    device = args.device
    hidden = torch.randn(tokens, hidden_size, device=device).to(getattr(torch, args.dtype)).requires_grad_()
    weight = torch.empty(vocabulary, hidden_size, device=device).normal_(std=0.05).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device), torch.randn(tokens, device=device)


def run(route: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, weight, targets, grad = inputs
    logprobs, entropy = ROUTES[route](hidden, weight, targets)
    d_hidden, d_weight = torch.autograd.grad(logprobs, (hidden, weight), grad)
    return logprobs.detach(), entropy, d_hidden, d_weight


def seconds(route: str, inputs: tuple[Tensor, ...]) -> float:
    cuda = inputs[0].is_cuda
    start = time.perf_counter()
    run(route, inputs)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(route: str, sizes: tuple[int, int, int], args: argparse.Namespace) -> int:
    """Peak memory over the inputs, after a round that loads the math libraries and compiles what needs it."""
    inputs = make_inputs(*sizes, args)
    run(route, inputs)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(route, inputs)
        return torch.cuda.max_memory_allocated() - before
    before = lower_high_water()
    run(route, inputs)
    return resident("VmHWM") - before


def lower_high_water() -> int:
    """Give freed memory back, bring the mark down to what is resident, and return that (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def peak_in_fresh_process(route: str, sizes: tuple[int, int, int], args: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--threads", str(args.threads), "--device", args.device, "--dtype", args.dtype]
    command += ["--peak-of", route, *map(str, sizes)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def bench(vocabulary: int, peaks: dict[str, int], args: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row a route."""
    inputs = make_inputs(args.tokens, args.hidden, vocabulary, args)
    expected = run("plain", inputs)
    differences = {
        route: max(float((a - b).abs().max()) for a, b in zip(run(route, inputs), expected, strict=True))
        for route in peaks
    }
    del expected
    times: dict[str, list[float]] = {route: [] for route in peaks}
    for _ in range(args.repeats):
        for route, seen in times.items():
            seen.append(seconds(route, inputs))
    gradients = args.hidden * (4 * vocabulary + inputs[0].element_size() * args.tokens)
    return [
        {
            "vocabulary": vocabulary,
            "route": route,
            "seconds": median(seen),
            "time_ratio": median(t / p for t, p in zip(seen, times["plain"], strict=True)),
            "peak_mib": peaks[route] / MIB,
            "memory_ratio": peaks[route] / peaks["plain"],
            "gradients_mib": gradients / MIB,
            "max_difference": differences[route],
        }
        for route, seen in times.items()
    ]


def line(row: dict[str, float | str]) -> str:
    forms = ("", "", ".3f", ".2f", ".0f", ".2f", ".0f", ".1e")
    cells = (format(value, form) for value, form in zip(row.values(), forms, strict=True))
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the hidden states")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--peak-of", nargs=4, metavar=("ROUTE", "TOKENS", "HIDDEN", "VOCABULARY"), default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        tokens, hidden_size, vocabulary = map(int, args.peak_of[1:])
        print(peak_bytes(args.peak_of[0], (tokens, hidden_size, vocabulary), args))
        return
    peaks = [
        {route: peak_in_fresh_process(route, (args.tokens, args.hidden, v), args) for route in ("plain", *args.heads)}
        for v in VOCABULARIES
    ]
    rows = [row for vocabulary, peak in zip(VOCABULARIES, peaks, strict=True) for row in bench(vocabulary, peak, args)]
    print(" ".join(f"{title:>{width}}" for title, width in COLUMNS.items()))
    for row in rows:
        print(line(row))
    facts = {name: getattr(args, name) for name in ("device", "dtype", "threads", "tokens", "hidden")}
    print(json.dumps({"bench": "head", **facts, "rows": rows}))


if __name__ == "__main__":
    main()
