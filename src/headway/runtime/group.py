"""The group of a learner's ranks: what rank 0 tells the others, how one joins, and how one learns of a lost peer."""

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist

from headway.config import ConfigError, RunConfig
from headway.models.loading import load_causal_lm
from headway.processes.child import LOOPBACK
from headway.runtime.devices import pick_device
from headway.training.ranks import Shards
from headway.types import Batch
from headway.weights.group import address_towards, call, listen

PrefixStore = cast(Any, dist).PrefixStore
"""Public there, but the stubs do not know it."""

LOST_A_PEER = 3
"""Exit code of a rank that failed because another did."""

REFUSED = 4
"""Exit code of a rank that refused what it was given; the last line of its log says why."""

MEET_TIMEOUT_S = 600.0
"""Loading a large model on one rank keeps the others waiting."""

_SIOCGIFADDR = 0x8915
"""Linux: asks an interface for its address."""

SCORED_BY_THE_LEARNER = ("exact_snapshot", "exact_interrupt", "ewma")
"""Values of `proximal` whose source runs the whole policy in rank 0's process."""


class Accumulate(msgspec.Struct, frozen=True, tag=True):
    """The first half of a step."""

    batch: Batch


class Step(msgspec.Struct, frozen=True, tag=True):
    """The second half."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write this rank's part of a checkpoint."""

    directory: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """Take up this rank's part of a checkpoint."""

    directory: str


Command = Accumulate | Step | Save | Load


class FollowerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank starts with; travels as JSON in the environment variable HEADWAY_RANK."""

    config: dict
    """The run's settings."""
    source: str
    """A model folder or hub id, or a checkpoint."""
    rank: int
    meeting: str
    """Where rank 0 listens for the others, `host:port/key`."""


def check_ranks(config: RunConfig, *, here: bool = False) -> None:
    """Refuse a number of ranks that this machine has no devices for. Raises ConfigError.

    `here`: they will be on this machine even if the run's were not.
    """
    learner = config.learner
    if learner.num_ranks == 1:
        return
    device = pick_device(learner.device)
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'learner.device = "{learner.device}" is one device, but learner.num_ranks = {learner.num_ranks}; '
            'set it to "cuda", where rank r takes device r, or to "cpu"'
        )
    if (here or config.runtime == "local") and device == "cuda" and learner.num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"learner.num_ranks = {learner.num_ranks}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            'set it to at most that, or learner.device to "cpu"'
        )


def rank_device(device: str, rank: int) -> str:
    """Device r of this machine for rank r."""
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device


def shard(config: RunConfig, model: Any, source: str | Path) -> Shards:
    """This rank's part of `model`; rank 0 keeps the whole policy too, for engines, checkpoints and who scores with it.

    That copy costs the device nothing unless its log-probs are taken at every step.
    """
    if dist.get_rank():
        return Shards(model, None)
    device = model.device if config.proximal in SCORED_BY_THE_LEARNER else "cpu"
    return Shards(model, load_causal_lm(source, device=device))


def open_meeting(host: str) -> tuple[Any, str]:
    """A store that ranks meet in, at this one address alone, and where that is: `host:port/key`.

    Every entry begins with the key, so nobody gets there by mistake. It is no secret: torch's store lists its entries
    to whoever asks. So the token that commands need must never be in there.
    """
    store, port = listen(host, MEET_TIMEOUT_S)
    key = secrets.token_hex(16)
    return PrefixStore(key, store), f"{host}:{port}/{key}"


def find_meeting(meeting: str) -> tuple[Any, str]:
    """The store that rank 0 opened, and this machine's address on the way to it."""
    address, _, key = meeting.partition("/")
    host, _, port = address.rpartition(":")
    return PrefixStore(key, call(host, int(port), MEET_TIMEOUT_S)), address_towards(host, int(port))


def join(store: Any, *, host: str, rank: int, num_ranks: int, device: str, timeout_s: float) -> None:
    """Become a rank of a group; returns when all have come. gloo, and nccl between CUDA devices.

    `host`: this machine's address, whose interface gloo uses. `timeout_s`: of every collective operation.
    """
    store.set(_arrival(rank), "")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost peer is an error here, not the end of the process
    if device == "cuda":
        torch.cuda.set_device(rank_device(device, rank))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def have_arrived(store: Any, ranks: Collection[int]) -> bool:
    """Whether these ranks have reached the meeting; does not wait."""
    return store.check([_arrival(rank) for rank in ranks])


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


def lost_a_peer(error: RuntimeError) -> bool:
    """Whether another rank's death or silence is what failed."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address of this machine. Raises ConfigError."""
    names = [name for _, name in socket.if_nameindex()]
    if address == LOOPBACK:
        return next(name for name in names if name.startswith("lo"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise ConfigError(f"{address} is no address of this machine, so learner ranks cannot meet there")
