"""Recorded batches: what the learner was given, so that its training can be repeated with no engine.

A bundle is one file a step, `batches/step-000012.msgpack`: `{schema, batch}` in the format of `headway.wire`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway import wire
from headway.errors import HeadwayError
from headway.types import Batch

BUNDLE_SCHEMA = 1


class BundleError(HeadwayError, RuntimeError):
    """A recorded batch is missing, damaged or of another schema; the message names the file."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    schema: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class _Header:
    schema: int


def write_batch(directory: Path, batch: Batch) -> None:
    """Record a batch before it trains; a killed run leaves no half file under this name."""
    directory.mkdir(exist_ok=True)
    target = _path(directory, batch.step)
    partial = target.with_suffix(".partial")
    partial.write_bytes(wire.encode(_Bundle(BUNDLE_SCHEMA, batch)))
    partial.replace(target)


def read_batch(directory: Path, step: int) -> Batch:
    """The batch of one step. Raises BundleError."""
    path = _path(directory, step)
    if not path.is_file():
        raise BundleError(f"no recorded batch {path}; runs record with `record = true`")
    data = path.read_bytes()
    try:
        schema = wire.decode(data, _Header).schema
        if schema != BUNDLE_SCHEMA:
            raise BundleError(f"{path} has bundle schema {schema}; this Headway reads {BUNDLE_SCHEMA}")
        batch = wire.decode(data, _Bundle).batch
    except msgspec.MsgspecError as error:
        raise BundleError(f"{path} is damaged: {error}") from error
    if fault := _fault(batch, step):
        raise BundleError(f"{path} is damaged: {fault}")
    return batch


PER_TOKEN = ("mask", "versions", "behavior_logprobs", "behavior_entropy", "proximal_logprobs")


def _fault(batch: Batch, step: int) -> str | None:
    """What no batch that was trained on can hold: training would fail on it later, or pass over it."""
    if batch.step != step:
        return f"it holds step {batch.step}"
    if not batch.groups:
        return "it holds no groups"
    for group in batch.groups:
        for member, response in enumerate(group.responses):
            for key in PER_TOKEN:
                values = getattr(response, key)
                if values is not None and values.shape != response.token_ids.shape:
                    lengths = f"{key} for {len(values)} of {len(response.token_ids)} tokens"
                    return f"group {group.group_id}, member {member} has {lengths}"
    return next(
        (f"some of its responses have {key} and others do not" for key in PER_TOKEN if _mixed(batch, key)), None
    )


def _mixed(batch: Batch, key: str) -> bool:
    return len({getattr(response, key) is None for group in batch.groups for response in group.responses}) > 1


def recorded_steps(directory: Path) -> Iterator[int]:
    """Steps on record, in order."""
    names = (path.stem.removeprefix("step-") for path in directory.glob("step-*.msgpack"))
    yield from sorted(int(name) for name in names if name.isdecimal())


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.msgpack"
