"""What a server that loads weights from files is given: verified versions, and a first folder to start from."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headway.models.loading import TOKENIZER_FILES
from headway.protocols import WeightsRefused
from headway.types import WeightRef
from headway.weights import read_weights
from headway.weights.servers import EMBEDDING, HEAD

Expected = Mapping[str, tuple[int, ...]]
"""Tensor name to shape."""


def expected_tensors(folder: Path) -> Expected:
    """Names and shapes of a model folder's safetensors files. Raises FileNotFoundError when it has none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def verified(ref: WeightRef, expected: Expected) -> None:
    """Raises WeightsRefused unless the file is whole and every tensor is expected, of its shape, and finite.

    Looked at here, because a server that meets a bad tensor halfway has already overwritten the others.
    """
    tensors = read_weights(ref)
    known({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefused(f"weights refused: {name!r} holds values that are not finite")


def known(shapes: Expected, expected: Expected) -> None:
    """Raises WeightsRefused unless these are the expected tensors."""
    if missing := sorted(expected.keys() - shapes.keys()):
        raise WeightsRefused(f"weights refused: {len(missing)} tensors are missing, first {missing[0]!r}")
    if EMBEDDING in expected:
        expected = {HEAD: expected[EMBEDDING], **expected}  # a tied head may come by its own name too
    if extra := sorted(shapes.keys() - expected.keys()):
        raise WeightsRefused(f"weights refused: {len(extra)} unknown tensors, first {extra[0]!r}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise WeightsRefused(f"weights refused: {name!r} has shape {shape}, expected {expected[name]}")


def version_folder(ref: WeightRef, model: Path, place: Path) -> Path:
    """A folder `version-N` in `place` that serves a published version of `model`; of earlier ones, the last stays."""
    versions = sorted(place.glob("version-*"), key=lambda path: int(path.name.removeprefix("version-")))
    for stale in versions[:-1]:
        shutil.rmtree(stale)
    source, target = place / "published", place / f"version-{ref.version}"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name in ("config.json", *TOKENIZER_FILES, "generation_config.json"):
        if (model / name).is_file():
            shutil.copy2(model / name, source / name)
    (source / "model.safetensors").symlink_to(Path(ref.path).resolve())
    return untied_copy(source, target)


def untied_copy(source: Path, target: Path) -> Path:
    """A folder that serves `source` with a head of its own; its safetensors files are linked, not copied.

    A server whose head is tied to the embedding may keep a repacked head of its own and never refresh it: vLLM's CPU
    build does, silently. With its own name the head is loaded like every other tensor.
    """
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    was_tied = config.get("tie_word_embeddings", False)
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)
    # The index of a sharded checkpoint stays behind: it would hide the file of the head.
    for file in _files(source):
        link = target / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    if was_tied:
        _write_head(source, target / "lm_head.safetensors")
    return target


def _write_head(source: Path, path: Path) -> None:
    for candidate in _files(source):
        with safe_open(candidate, framework="pt") as file:
            if EMBEDDING in file.keys():  # noqa: SIM118
                save_file({HEAD: file.get_tensor(EMBEDDING).clone()}, path, metadata={"format": "pt"})
                return
    raise WeightsRefused(f"{source} has tied embeddings but no tensor {EMBEDDING!r} to make a head from")


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}: an engine that serves it has nothing to load")
    return files
