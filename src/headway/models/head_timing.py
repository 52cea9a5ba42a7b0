"""The head's candidates side by side on this device: seconds of forward and backward, and peak memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from headway.models.head import token_logprobs
from headway.models.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate took. Example: `Timing(seconds=0.031, peak_bytes=1_200_000_000)`"""

    seconds: float
    """Median of forward and backward."""
    peak_bytes: int
    """On top of the inputs, gradients included; 0 on CPU, where it cannot be told apart in one process."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """One scoring problem of a run. Example: `HeadShape(tokens=8192, hidden=2048, vocabulary=151_936)`"""

    tokens: int
    hidden: int
    vocabulary: int


def time_heads(
    heads: Mapping[str, Tiles],
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    device: str,
    temperature: float = 1.0,
    repeats: int = 5,
) -> dict[str, Timing | str]:
    """Each candidate's timing, taken in turns; where it cannot run here, the first line of its error.

    States in `dtype`, the LM head in float32, as in training. The first round, which compiles, is not counted.
    """
    own = torch.Generator(device).manual_seed(0)  # a run's own random state stays as it is
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, generator=own).to(dtype).requires_grad_()
    weight = (
        torch.empty(shape.vocabulary, shape.hidden, device=device).normal_(std=0.05, generator=own).requires_grad_()
    )
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device=device, generator=own)

    def step(tiles: Tiles) -> None:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=temperature, tiles=tiles)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    failures: dict[str, str] = {}
    for name, tiles in heads.items():
        try:
            step(tiles)
        except RuntimeError as error:  # no compiler, a GPU too old for it, no memory: all are its subclasses
            failures[name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
    working = {name: tiles for name, tiles in heads.items() if name not in failures}
    rounds = [
        {name: _measure(lambda t=tiles: step(t), hidden) for name, tiles in working.items()} for _ in range(repeats)
    ]
    found = {
        name: Timing(median(r[name].seconds for r in rounds), max(r[name].peak_bytes for r in rounds))
        for name in working
    }
    return {name: found[name] if name in found else failures[name] for name in heads}


def fastest(timings: Mapping[str, Timing | str], shape: HeadShape, *, default: str) -> str:
    """The fastest candidate that needs no more memory than `default` and a fifth of one float32 `[N, V]` tensor."""
    usual = timings[default]
    if isinstance(usual, str):
        return default
    bound = usual.peak_bytes + 4 * shape.tokens * shape.vocabulary // 5
    fitting = {name: t.seconds for name, t in timings.items() if isinstance(t, Timing) and t.peak_bytes <= bound}
    return min(fitting, key=lambda name: fitting[name])


def _measure(step: Callable[[], None], like: Tensor) -> Timing:
    if not like.is_cuda:
        begun = time.perf_counter()
        step()
        return Timing(time.perf_counter() - begun, 0)
    torch.cuda.synchronize(like.device)
    torch.cuda.reset_peak_memory_stats(like.device)
    before, begun = torch.cuda.memory_allocated(like.device), time.perf_counter()
    step()
    torch.cuda.synchronize(like.device)
    return Timing(time.perf_counter() - begun, torch.cuda.max_memory_allocated(like.device) - before)
