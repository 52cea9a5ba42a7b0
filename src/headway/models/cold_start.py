"""A short supervised cold start for tiny models: reinforcement learning needs some right answers to begin with."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headway.errors import HeadwayError
from headway.models.cache_directory import cache_directory
from headway.models.loading import save_causal_lm
from headway.models.tiny import TINY_SIZES, character_tokenizer, tiny_model
from headway.types import Ints

Examples = Sequence[tuple[Ints, Ints]]
"""Pairs of prompt ids and answer ids, the end-of-text token included."""

_IGNORED = -100
_TELL_EVERY_S = 10.0
_CHECK_EVERY = 5


LEARNING_RATES = {"0.4m": 2e-3, "0.4m-wide": 2e-3, "3m": 1e-3, "3m-wide": 1e-3, "moe": 2e-3}
"""By size of the model."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Settings of a cold start; equal settings share one cached model.

    Example: `ColdStart(size="0.4m", seed=0, accuracy=0.6)`
    """

    size: str
    seed: int
    accuracy: float
    """Stop once this share of the validation answers is right, greedily."""
    learning_rate: float = 2e-3
    batch_size: int = 128
    max_steps: int = 3000


class ColdStartFailed(HeadwayError, RuntimeError):
    """The accuracy was not reached within the steps allowed, or the model could not be stored."""


def cached_cold_start(
    settings: ColdStart, train: Examples, validation: Examples, *, say: Callable[[str], None] = lambda message: None
) -> Path:
    """Directory of a model trained as `settings` say, made on first use and kept in `cache_directory()`.

    A folder appears under its name only when it is whole, so a kill leaves nothing that looks finished, and of two
    runs that make the same one the second to finish uses the first's. One that was damaged since is made again.
    Raises ColdStartFailed.
    """
    target = cache_directory() / f"tiny-{settings.size}-{_digest(settings, train, validation)}"
    if target.is_dir():
        if (damage := _damage(target)) is None:
            return target
        say(f"cold start: the cached model in {target} is damaged ({damage}); making it again")
        _discard(target)
    say(f"cold start: supervised training of tiny:{settings.size} to accuracy {settings.accuracy:g}, once")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model = tiny_model(settings.size, settings.seed)
        facts = cold_start(model, settings, train, validation, say=say)
        _save(model, {**asdict(settings), **facts}, target)
    except (OSError, SafetensorError) as error:
        raise ColdStartFailed(
            f"cannot write {target}: {error}; make room there, or name another folder in HEADWAY_CACHE"
        ) from error
    return target


def _save(model: PreTrainedModel, facts: dict[str, Any], target: Path) -> None:
    """The folder appears whole or not at all; one that another run made meanwhile stays."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=target.parent))
    try:
        save_causal_lm(model, character_tokenizer(), partial)
        (partial / "cold_start.json").write_text(json.dumps(facts))
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another run was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _damage(directory: Path) -> str | None:
    """What keeps the folder from being loaded; reads no weights, so a flipped bit stays unseen."""
    try:
        for name in ("config.json", "tokenizer.json"):
            json.loads((directory / name).read_bytes())
        with safe_open(directory / "model.safetensors", "pt"):
            return None
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)


def _discard(directory: Path) -> None:
    """Out of the way in one go: whoever looks sees the old folder or none."""
    aside = Path(tempfile.mkdtemp(prefix="partial-", dir=directory.parent))
    with suppress(FileNotFoundError):  # another run was faster
        directory.rename(aside / "damaged")
    shutil.rmtree(aside)


def cold_start(
    model: PreTrainedModel,
    settings: ColdStart,
    train: Examples,
    validation: Examples,
    *,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, float]:
    """Next-token training on the answers, until validation accuracy is reached; returns `steps` and `accuracy`.

    Deterministic in the settings and the examples. Raises ColdStartFailed.
    """
    rows, labels = _lay_out(train)
    held_out = _lay_out(validation[:400])
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    reached, told = 0.0, time.monotonic()
    for step in range(1, settings.max_steps + 1):
        chosen = torch.from_numpy(rng.choice(len(rows), min(settings.batch_size, len(rows)), replace=False))
        logits = model(input_ids=rows[chosen], use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen][:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Carries are learned within a few steps, so near the goal every one of them is looked at.
        if step % _CHECK_EVERY == 0 or reached > 0.75 * settings.accuracy:
            reached = exact_match(model, *held_out)
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                say(
                    f"cold start: step {step}, accuracy {reached:.2f} of {settings.accuracy:g}, which comes late: "
                    "usually between steps 100 and 350"
                )
            if reached >= settings.accuracy:
                return {"steps": step, "reached": reached}
    raise ColdStartFailed(
        f"cold start reached accuracy {reached:.3f} of {settings.accuracy:g} in {settings.max_steps} steps; "
        "lower model.cold_start_accuracy or distill.teacher_accuracy, or name a trained model"
    )


@torch.no_grad()
def exact_match(model: PreTrainedModel, rows: Tensor, labels: Tensor) -> float:
    """Share of answers that greedy decoding gets wholly right: the likeliest token is the right one everywhere."""
    predicted = model(input_ids=rows, use_cache=False).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((predicted == wanted) | (wanted == _IGNORED)).all(1).float().mean())


def _lay_out(examples: Examples) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, `[N, S]`, and labels that are ignored on prompt and padding."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    rows = np.zeros((len(examples), width), np.int64)
    labels = np.full((len(examples), width), _IGNORED, np.int64)
    for row, label, (prompt, answer) in zip(rows, labels, examples, strict=True):
        end = len(prompt) + len(answer)
        row[:end] = np.concatenate([prompt, answer])
        label[len(prompt) : end] = answer
    return torch.from_numpy(rows), torch.from_numpy(labels)


def _digest(settings: ColdStart, train: Examples, validation: Examples) -> str:
    facts = {**asdict(settings), **TINY_SIZES[settings.size]}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8)
    for prompt, answer in (*train, *validation):
        digest.update(prompt.tobytes() + b"/" + answer.tobytes() + b";")
    return digest.hexdigest()
