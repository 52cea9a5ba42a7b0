"""Which weight channel a run's settings ask for."""

from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

import torch

from headway.config import ConfigError, RunConfig
from headway.processes.child import LOOPBACK
from headway.protocols import WeightChannel
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.group import interface_of
from headway.runtime.placing import engine_devices, gpus_of_a_server, learner_device
from headway.runtime.run_folder import RunFolder
from headway.weights import CollectiveChannel, DeltaChannel, DiskChannel, MemoryChannel
from headway.weights.group import ImageSender, address_towards
from headway.weights.servers import ServerSender

CHANNELS = {"vllm": ("memory", "disk"), "sglang": ("memory", "disk", "collective")}
"""What servers can take: plain safetensors files, and, where one knows how, a broadcast."""


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
            device, host = learner_device(config), _listening(config, host)
            return CollectiveChannel(
                dtype=served_dtype(config),
                # A broken broadcast must end, and be repeated, before healthy engines in it count as hung.
                timeout_s=config.engines.update_timeout_s / 4,
                say=say,
                backend=broadcast_backend(device, engine_devices(config)),
                device=device,
                host=host,
                sender=ImageSender if config.engine == "torch" else _server_sender(config, host),
            )


def check_channel(config: RunConfig) -> None:
    """Refuse a channel that the engine cannot read. Raises ConfigError."""
    allowed = CHANNELS.get(config.engine, ("memory", "disk", "delta", "collective"))
    if config.weights not in allowed:
        choice = " or ".join(f'"{name}"' for name in allowed)
        raise ConfigError(
            f'weights = "{config.weights}" needs another engine to put a version together; engine = "{config.engine}" '
            f'takes {choice}: set weights to one of these, where it runs on another machine not to "memory"'
        )


def _server_sender(config: RunConfig, host: str) -> "partial[ServerSender]":
    # A server that is joined must have one rank, which its client makes sure of.
    width = 1 if config.engines.url else gpus_of_a_server(config)
    return partial(ServerSender, width=width, interface=interface_of(host))


def _listening(config: RunConfig, host: str) -> str:
    """The address where engines meet: this machine's own towards a server that is joined. Raises ConfigError."""
    parts = urlsplit(config.engines.url)
    if not parts.hostname:
        return host
    try:
        return address_towards(parts.hostname, parts.port or 80)
    except OSError as error:
        raise ConfigError(f"engines.url: no way leads to {parts.hostname!r}: {error}") from error


def broadcast_backend(learner: str, engines: Sequence[str]) -> str:
    """nccl where learner and engines have each a GPU of their own, which it demands; else gloo, through the host."""
    devices = [torch.device(name) for device in (learner, *engines) for name in _each(device)]
    # "cuda" alone names no GPU, so two of them may be the same one.
    are_known = all(device.type == "cuda" and device.index is not None for device in devices)
    return "nccl" if are_known and len(set(devices)) == len(devices) else "gloo"


def _each(device: str) -> list[str]:
    """`cuda:2,3` is two."""
    kind, _, numbers = device.partition(":")
    return [f"{kind}:{number}" for number in numbers.split(",")] if numbers else [kind]


def served_dtype(config: RunConfig) -> torch.dtype:
    """What engines compute with, so that nothing travels which they would round away."""
    rounded = config.engines.round_weights == "bfloat16"
    return torch.bfloat16 if rounded else pick_dtype(config.model.dtype, pick_device(config.engines.device))
