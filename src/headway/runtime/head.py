"""Which of the fused head's candidates a run takes: the one its settings name, or the fastest here, measured once.

A candidate moves the last bits of log-probs and gradients, so the choice is written into the run folder and every
later `resume`, `replay` and `compare` takes it from there (`RunFolder.open`).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from transformers import AutoConfig

from headway.config import RunConfig, with_head
from headway.models.head_timing import HeadShape, Timing, fastest, time_heads
from headway.models.tiles import EAGER, HEADS, Tiles
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.run_folder import RunFolder, write_atomically


def tiles_of(config: RunConfig) -> Tiles:
    """The tiles of a run; before anything was chosen those of "eager"."""
    return EAGER if config.learner.head == "auto" else HEADS[config.learner.head]


def settle_head(
    config: RunConfig,
    folder: RunFolder,
    model: str,
    *,
    say: Callable[[str], None],
    measure: Callable[..., dict[str, Timing | str]] = time_heads,
) -> RunConfig:
    """The settings with `learner.head` decided, and the decision in the folder. On CPU "auto" is "eager"."""
    if config.learner.head != "auto":
        return config
    device = pick_device(config.learner.device)
    if device == "cpu":
        return _keep(config, folder, "eager", {"device": "cpu"})
    shape = head_shape(config, model)
    dtype = pick_dtype(config.model.dtype, device)
    timings = measure(HEADS, shape, dtype=dtype, device=device, temperature=config.sampling.temperature)
    torch.cuda.empty_cache()
    chosen = fastest(timings, shape, default="eager")
    said = ", ".join(f"{name} {_said(timing)}" for name, timing in timings.items())
    say(f'head: "{chosen}" for {shape.tokens} tokens of {shape.vocabulary} ids, forward and backward: {said}')
    measured = {name: asdict(t) if is_dataclass(t) else t for name, t in timings.items()}
    return _keep(config, folder, chosen, {"device": device, "shape": asdict(shape), "measured": measured})


def head_shape(config: RunConfig, model: str) -> HeadShape:
    """The largest problem the head meets in a step of this run."""
    sizes = AutoConfig.from_pretrained(model)
    sampled = config.batch_size * config.sampling.max_response_tokens
    return HeadShape(min(config.learner.micro_batch_tokens, sampled), sizes.hidden_size, sizes.vocab_size)


def _keep(config: RunConfig, folder: RunFolder, head: str, facts: dict[str, Any]) -> RunConfig:
    write_atomically(folder.head_path, json.dumps({"head": head, **facts}))
    return with_head(config, head)


def _said(timing: Timing | str) -> str:
    if isinstance(timing, str):
        return f"cannot run here ({timing})"
    return f"{1e3 * timing.seconds:.1f} ms, {timing.peak_bytes / 2**20:.0f} MiB"
