"""A learner on several ranks, seen by the loop as one: rank 0 lives here, the others are processes that follow it."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
import zmq
from torch import Tensor

from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.processes.child import Server
from headway.runtime.devices import pick_device
from headway.runtime.group import (
    LOST_A_PEER,
    MEET_TIMEOUT_S,
    REFUSED,
    Accumulate,
    Command,
    FollowerSettings,
    Load,
    Save,
    Step,
    have_arrived,
    join,
    lost_a_peer,
    open_meeting,
)
from headway.runtime.run_folder import RunFolder
from headway.runtime.site import HERE, Site
from headway.training.learner import TorchLearner
from headway.types import Batch, Floats, Ints, StepReport
from headway.wire import encode

T = TypeVar("T")

_START_TIMEOUT_S = 600.0
_SETTLE_S = 10.0
"""How long the ranks that lost a peer have to end, so that the one at fault stands out."""


class RankLost(HeadwayError, RuntimeError):
    """A rank of the learner died or fell silent; the message names it. The run can be resumed."""


class RankRefused(HeadwayError, RuntimeError):
    """A rank other than rank 0 refused what it was given; the message is what that rank said."""


class Followers:
    """Ranks 1, 2, … of a learner as servers of their own; this process is rank 0 of the group.

    Blocking; one call at a time. A step without one of the ranks is impossible, so a lost one ends the run. `stack`
    ends the processes.
    """

    def __init__(
        self, config: RunConfig, source: str | Path, folder: RunFolder, stack: ExitStack, site: Site = HERE
    ) -> None:
        self._children: dict[int, Server] = {}
        self._sockets: list[zmq.Socket[bytes]] = []
        stack.callback(self.close)
        self._timeout_s = config.learner.rank_timeout_s
        self._token = secrets.token_hex(16)
        num_ranks = config.learner.num_ranks
        store, meeting = open_meeting(site.host)

        def start(rank: int) -> None:
            settings = FollowerSettings(
                config=config.model_dump(mode="json"),
                source=str(source),
                rank=rank,
                meeting=meeting,
            )
            self._children[rank] = site.spawn(
                "headway.runtime.follower",
                {"HEADWAY_RANK": msgspec.json.encode(settings).decode(), "HEADWAY_TOKEN": self._token},
                what=f"learner rank {rank}",
                log_path=folder.logs / f"learner-rank-{rank}.log",
                start_timeout_s=_START_TIMEOUT_S,
            )

        try:
            with ThreadPoolExecutor(num_ranks - 1) as threads:
                list(threads.map(start, range(1, num_ranks)))
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        self._sockets = [_connected(child) for child in self._children.values()]
        self._await_arrival(store)
        device = pick_device(config.learner.device)
        self.meet(
            lambda: join(store, rank=0, num_ranks=num_ranks, host=site.host, device=device, timeout_s=self._timeout_s)
        )

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids by rank."""
        return {rank: child.pid for rank, child in self._children.items()}

    def together(self, command: Command, call: Callable[[], T]) -> T:
        """Make `call` here while every other rank obeys `command`; raises as `meet` does."""
        self._require_alive()
        message = [self._token.encode(), encode(command)]
        for socket in self._sockets:
            socket.send_multipart(message)
        return self.meet(call)

    def meet(self, call: Callable[[], T]) -> T:
        """Make a call that the other ranks make of themselves. Raises RankRefused, RankLost, and what `call` does."""
        try:
            return call()
        except RuntimeError as error:
            if not lost_a_peer(error):
                raise
            self._await_end()
            self._require_alive()
            raise RankLost(f"{self._silent()} within learner.rank_timeout_s = {self._timeout_s:g}: {error}") from error

    def close(self) -> None:
        """End the processes and leave the group."""
        for socket in self._sockets:
            socket.close(linger=0)
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            child.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _await_arrival(self, store: Any) -> None:
        """Until every rank is at the meeting: in the joining itself one that died would be noticed late."""
        deadline = time.monotonic() + MEET_TIMEOUT_S
        while not have_arrived(store, self._children):
            self._require_alive()
            for rank, child in self._children.items():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise RankLost(
                        f"learner rank {rank} did not reach the meeting of the ranks; the end of {child.log_path}:\n"
                        f"{child.log_tail()}"
                    )
            time.sleep(0.05)

    def _require_alive(self) -> None:
        """Raises RankRefused or RankLost naming a rank that ended of itself, and how."""
        for rank, child in self._children.items():
            code = child.poll()
            if code == REFUSED:
                raise RankRefused(child.log_tail(1).removeprefix("headway "))
            if code not in (None, LOST_A_PEER):
                raise RankLost(
                    f"learner rank {rank} died (exit {code}); `headway resume` goes on from what is "
                    f"committed. The end of {child.log_path}:\n{child.log_tail()}"
                )

    def _await_end(self) -> None:
        """Until a rank has ended of itself, or all have, or the time is up."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            codes = [child.poll() for child in self._children.values()]
            if None not in codes or any(code not in (None, LOST_A_PEER) for code in codes):
                return
            time.sleep(0.05)

    def _silent(self) -> str:
        silent = [str(rank) for rank, child in self._children.items() if child.poll() is None]
        return f"learner rank {', '.join(silent)} did not do its part" if silent else "learner ranks did not meet"


class RankedLearner:
    """A `TorchLearner` that is rank 0 of several: the others hear of every call just before it is made."""

    def __init__(self, learner: TorchLearner, followers: Followers) -> None:
        self._learner, self._followers = learner, followers

    @property
    def policy_version(self) -> int:
        return self._learner.policy_version

    @property
    def model(self) -> Any:
        """The whole policy, current after every step."""
        return self._learner.model

    def train(self, batch: Batch) -> StepReport:
        self.accumulate(batch)
        return self.step()

    def accumulate(self, batch: Batch) -> None:
        self._followers.together(Accumulate(batch), lambda: self._learner.accumulate(batch))

    def step(self) -> StepReport:
        return self._followers.together(Step(), self._learner.step)

    def weights(self) -> Mapping[str, Tensor]:
        return self._learner.weights()

    def next_logprobs(self, prompts: Sequence[Ints]) -> Floats:
        """As `TorchLearner.next_logprobs`, from the whole policy."""
        return self._learner.next_logprobs(prompts)

    def save(self, directory: Path) -> None:
        self._followers.together(Save(str(directory)), lambda: self._learner.save(directory))

    def load(self, directory: Path) -> None:
        self._followers.together(Load(str(directory)), lambda: self._learner.load(directory))


def _connected(child: Server) -> "zmq.Socket[bytes]":
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(child.endpoint)
    return socket
