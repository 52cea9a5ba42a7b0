"""What this machine supports and lacks, and what to install for the rest."""

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from headway.engine.architecture import SUPPORTED

OPTIONAL = {
    "datasets": ("datasets", "GSM8K-format data by data-set name"),
    "reasoning_gym": ("reasoning-gym", "tasks named reasoning_gym:<task>"),
    "gguf": ("gguf", "building SmolLM2 from its GGUF file"),
    "plotly": ("report", "`headway report`, `headway watch` and the plots of `headway compare`"),
    "tensorboard": ("tensorboard", 'report.sinks = ["tensorboard"]'),
    "wandb": ("wandb", 'report.sinks = ["wandb"]'),
    "trackio": ("trackio", 'report.sinks = ["trackio"]'),
    "ray": ("ray", 'runtime = "ray"'),
    "matplotlib": ("plot", "the plots of `headway study` and `headway law fit --plot`"),
    "simpy": ("planner", "`headway plan`"),
    "scipy": ("planner", "`headway plan`, `headway law` and `headway study`"),
}
"""Importable module to (extra of this project, what it is for)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Example: `Finding("CUDA", "lacks", "no device; runs use the CPU in float32")`
    """

    what: str
    state: Literal["ok", "lacks"]
    note: str


def examine() -> list[Finding]:
    """Look at this machine; nothing is changed and nothing is loaded."""
    return [
        Finding("Python", "ok", platform.python_version()),
        *(Finding(name, "ok", version(name)) for name in ("torch", "transformers")),
        _cuda(),
        Finding("CPU cores", "ok", f"{os.cpu_count()}; one for the learner, one for each engine is a good split"),
        _shared_memory(),
        Finding("engine torch", "ok", f"model types: {', '.join(sorted(SUPPORTED))}"),
        *(_optional(module, extra, purpose) for module, (extra, purpose) in OPTIONAL.items()),
    ]


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", "lacks", "no device; runs use the CPU in float32")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Finding("CUDA", "ok", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}; bfloat16 forward passes")


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "lacks", f'weights = "memory" uses files in {tempfile.gettempdir()} instead')
    free = shutil.disk_usage(path).free / 2**30
    return Finding("shared memory", "ok", f"{free:.1f} GiB free; two copies of the parameters must fit")


def _optional(module: str, extra: str, purpose: str) -> Finding:
    if find_spec(module) is None:
        return Finding(module, "lacks", f"for {purpose}: pip install 'headway[{extra}]'")
    try:
        return Finding(module, "ok", f"{version(module.replace('_', '-'))}, for {purpose}")
    except PackageNotFoundError:
        return Finding(module, "ok", f"for {purpose}")
