"""Which weight channel a run's settings ask for."""

from collections.abc import Callable, Sequence

import torch

from headway.config import ConfigError, RunConfig
from headway.processes.child import LOOPBACK
from headway.protocols import WeightChannel
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.placing import engine_devices, learner_device
from headway.runtime.run_folder import RunFolder
from headway.weights import CollectiveChannel, DeltaChannel, DiskChannel, MemoryChannel

FILES = ("memory", "disk")
"""Channels whose versions are plain safetensors files, which any server can load."""


def build_channel(
    config: RunConfig, folder: RunFolder, host: str = LOOPBACK, *, say: Callable[[str], None]
) -> WeightChannel:
    """The channel that `weights` names. Its files, where it has any, lie in the run folder or in shared memory."""
    match config.weights:
        case "memory":
            return MemoryChannel()
        case "disk":
            return DiskChannel(folder.weights)
        case "delta":
            return DeltaChannel(folder.weights, dtype=served_dtype(config), say=say)
        case "collective":
            device = learner_device(config)
            return CollectiveChannel(
                dtype=served_dtype(config),
                # A broken broadcast must end, and be repeated, before healthy engines in it count as hung.
                timeout_s=config.engines.update_timeout_s / 4,
                say=say,
                backend=broadcast_backend(device, engine_devices(config)),
                device=device,
                host=host,
            )


def check_channel(config: RunConfig) -> None:
    """Refuse a channel that the engine cannot read. Raises ConfigError."""
    if config.engine != "torch" and config.weights not in FILES:
        raise ConfigError(
            f'weights = "{config.weights}" needs the built-in engine to put a version together; engine = '
            f'"{config.engine}" loads whole files: set weights to "memory" or, on a shared file system, "disk"'
        )


def broadcast_backend(learner: str, engines: Sequence[str]) -> str:
    """nccl where learner and engines have each a GPU of their own, which it demands; else gloo, through the host."""
    devices = [torch.device(name) for name in (learner, *engines)]
    # "cuda" alone names no GPU, so two of them may be the same one.
    are_known = all(device.type == "cuda" and device.index is not None for device in devices)
    return "nccl" if are_known and len(set(devices)) == len(devices) else "gloo"


def served_dtype(config: RunConfig) -> torch.dtype:
    """What engines compute with, so that nothing travels which they would round away."""
    rounded = config.engines.round_weights == "bfloat16"
    return torch.bfloat16 if rounded else pick_dtype(config.model.dtype, pick_device(config.engines.device))
