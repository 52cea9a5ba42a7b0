"""The fused log-prob + entropy head against plain `log_softmax`: time and peak memory, forward and backward.

    python scripts/bench_head.py [--tokens 2048] [--hidden 576] [--repeats 5] [--threads 2] [--device cpu]

Times are taken in turns in one process (median). Peak memory is what a route adds on top of its inputs, the
gradients it must return included: on CPU the growth of the high-water mark of a fresh process per route
(`ru_maxrss`), on CUDA `torch.cuda.max_memory_allocated`. Prints a table, then one JSON line.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from headway.models.head import token_logprobs

VOCABULARIES = (151_936, 49_152)
MIB = 2**20
WIDTHS = (10, 8, 8, 6, 10, 10, 6, 14)
Route = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets.unsqueeze(-1)).squeeze(-1), entropy


ROUTES: dict[str, Route] = {"plain": plain, "fused": token_logprobs}


def make_inputs(tokens: int, hidden_size: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device).requires_grad_()
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


def peak_bytes(route: str, sizes: tuple[int, int, int], device: str) -> int:
    """Peak memory over the inputs; on CPU the process must be fresh, because a high-water mark never falls."""
    run(route, make_inputs(8, 16, 32, device))  # loads the math libraries
    inputs = make_inputs(*sizes, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(route, inputs)
        return torch.cuda.max_memory_allocated() - before
    before = high_water()
    run(route, inputs)
    return high_water() - before


def high_water() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_in_fresh_process(route: str, sizes: tuple[int, int, int], args: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--threads", str(args.threads), "--device", args.device]
    command += ["--peak-of", route, *map(str, sizes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bench(vocabulary: int, peaks: dict[str, int], args: argparse.Namespace) -> dict[str, float]:
    inputs = make_inputs(args.tokens, args.hidden, vocabulary, args.device)
    pairs = zip(run("plain", inputs), run("fused", inputs), strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    times: dict[str, list[float]] = {route: [] for route in ROUTES}
    for _ in range(args.repeats):
        for route in ROUTES:
            times[route].append(seconds(route, inputs))
    gradients = 4 * args.hidden * (vocabulary + args.tokens)
    return {
        "vocabulary": vocabulary,
        "tokens": args.tokens,
        "hidden": args.hidden,
        "plain_s": median(times["plain"]),
        "fused_s": median(times["fused"]),
        "time_ratio": median(f / p for f, p in zip(times["fused"], times["plain"], strict=True)),
        "plain_mib": peaks["plain"] / MIB,
        "fused_mib": peaks["fused"] / MIB,
        "memory_ratio": peaks["fused"] / peaks["plain"],
        "gradients_mib": gradients / MIB,
        "max_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peak-of", nargs=4, metavar=("ROUTE", "TOKENS", "HIDDEN", "VOCABULARY"), default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        tokens, hidden_size, vocabulary = map(int, args.peak_of[1:])
        print(peak_bytes(args.peak_of[0], (tokens, hidden_size, vocabulary), args.device))
        return
    # All memory first: a child starts with the high-water mark its parent had.
    peaks = [
        {route: peak_in_fresh_process(route, (args.tokens, args.hidden, v), args) for route in ROUTES}
        for v in VOCABULARIES
    ]
    rows = [bench(vocabulary, peak, args) for vocabulary, peak in zip(VOCABULARIES, peaks, strict=True)]
    titles = ("vocabulary", "plain s", "fused s", "ratio", "plain MiB", "fused MiB", "ratio", "gradients MiB")
    print(" ".join(f"{title:>{width}}" for title, width in zip(titles, WIDTHS, strict=True)))
    for r in rows:
        cells = (
            f"{r['vocabulary']}",
            f"{r['plain_s']:.2f}",
            f"{r['fused_s']:.2f}",
            f"{r['time_ratio']:.2f}",
            f"{r['plain_mib']:.0f}",
            f"{r['fused_mib']:.0f}",
            f"{r['memory_ratio']:.2f}",
            f"{r['gradients_mib']:.0f}",
        )
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)))
    print(json.dumps({"bench": "head", "device": args.device, "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
