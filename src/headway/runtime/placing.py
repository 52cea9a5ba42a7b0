"""Which GPU of this machine each engine of a run computes on."""

import torch

from headway.config import ConfigError, RunConfig
from headway.engine.gpus import num_gpus
from headway.runtime.devices import pick_device


def engine_devices(config: RunConfig) -> list[str]:
    """Where each engine computes, such as `cuda:1`, or `cuda:2,3` for a server of two GPUs. Raises ConfigError.

    Engines share out the GPUs that the learner leaves; where it leaves too few, they share all, in turn. A built-in
    engine may have a GPU together with others, a server may not: it fills the memory. A device with a number is the
    device of every engine. Under Ray, and for a server that runs already, others decide.
    """
    engines, device = config.engines, pick_device(config.engines.device)
    if config.runtime == "ray" or engines.url or not device.startswith("cuda"):
        return [device] * engines.num_engines
    width = 1 if config.engine == "torch" else gpus_of_a_server(config)
    if ":" in device:
        _check_named(config, device, width)
        return [device] * engines.num_engines
    num_here = torch.cuda.device_count()
    if not num_here:
        return [device] * engines.num_engines  # torch's own words on what this machine lacks are clear
    learners = learner_gpus(config)
    left = [gpu for gpu in range(num_here) if gpu not in learners]
    if config.engine == "torch":
        there = left or list(range(num_here))
        return [f"cuda:{there[i % len(there)]}" for i in range(engines.num_engines)]
    needed = engines.num_engines * width
    there = left if needed <= len(left) else list(range(num_here))
    if needed > len(there):
        raise ConfigError(
            f"engines.num_engines = {engines.num_engines} {config.engine} servers of {width} GPU(s) each, but this "
            f"machine has {num_here}; set it to at most {num_here // width}, or join one elsewhere by engines.url"
        )
    groups = (there[i * width : (i + 1) * width] for i in range(engines.num_engines))
    return [f"cuda:{','.join(map(str, group))}" for group in groups]


def learner_device(config: RunConfig) -> str:
    """Where rank 0 computes, with its number where that is known."""
    device = pick_device(config.learner.device)
    return "cuda:0" if device == "cuda" and config.runtime == "local" and torch.cuda.device_count() else device


def learner_gpus(config: RunConfig) -> set[int]:
    """GPUs of this machine that the learner's ranks take."""
    kind, _, number = pick_device(config.learner.device).partition(":")
    if kind != "cuda":
        return set()
    return {int(number)} if number.isdecimal() else set(range(config.learner.num_ranks))


def gpus_of_a_server(config: RunConfig) -> int:
    """By its arguments. Raises ConfigError."""
    try:
        return num_gpus(config.engines.server_args)
    except ValueError as error:
        raise ConfigError(f"engines.server_args: {error}") from error


def _check_named(config: RunConfig, device: str, width: int) -> None:
    numbers = device.partition(":")[2].split(",")
    num_here = torch.cuda.device_count()
    if not all(number.isdecimal() and int(number) < (num_here or 1 << 10) for number in numbers):
        raise ConfigError(f'engines.device = "{device}", but this machine has {num_here} CUDA devices, counted from 0')
    if config.engine == "torch" and len(numbers) > 1:
        raise ConfigError(f'engines.device = "{device}", but a built-in engine computes on one GPU; set it to "cuda"')
    if config.engine != "torch" and config.engines.num_engines * width > len(numbers):
        raise ConfigError(
            f'engines.device = "{device}" is the GPU of every engine, which {config.engines.num_engines} '
            f'{config.engine} server(s) of {width} GPU(s) each cannot share; set it to "cuda", or name more'
        )
