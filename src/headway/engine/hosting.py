"""What a pool of engines holds: a place where an engine runs, however it got there, and a client that talks to it."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from headway.engine.remote import RemoteEngine
from headway.processes.child import LOOK_S, still_wanted, tail
from headway.processes.keeper import keeper_of
from headway.protocols import Engine
from headway.types import EngineStatus


class Client(Engine, Protocol):
    """An engine as its pool sees it."""

    @property
    def num_pending(self) -> int:
        """Calls not yet answered."""
        ...

    @property
    def last_status(self) -> EngineStatus | None:
        """As of the latest reply."""
        ...

    def give_back(self, error: Exception) -> None:
        """Raise `error` from every unfinished `generate`."""
        ...

    def fail_all(self, error: Exception) -> None:
        """Raise `error` from every pending and every later call."""
        ...

    def close(self) -> None: ...


class Host(Protocol):
    """Where one engine runs; blocking calls are made outside the event loop."""

    @property
    def client(self) -> Client: ...

    def poll(self) -> int | None:
        """An exit code once the engine is gone for good, None while it is there."""
        ...

    def kill(self) -> None:
        """Make `poll` say so soon."""
        ...

    def stop(self) -> int:
        """End it in order; blocking."""
        ...

    def log_tail(self) -> str:
        """What it said last."""
        ...


Launch = Callable[[str, Path], Host]
"""Name and log file to a running engine without weights; blocking. Raises RuntimeError with the reason."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server started here, its keeper, which leads a process group of its own, and its client."""

    process: "subprocess.Popen[bytes]"
    client: RemoteEngine
    log_path: Path

    def poll(self) -> int | None:
        if self.process.poll() is None and self.client.is_lost:
            self.kill()  # a server that does not answer is as good as dead
            self.process.wait()
        return self.process.poll()

    def kill(self) -> None:
        signal_group(self.process, signal.SIGKILL)

    def stop(self, grace_s: float = 20.0) -> int:
        """SIGTERM to the server, by its keeper; SIGKILL to all that is left then, or after `grace_s`."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        signal_group(self.process, signal.SIGKILL)
        return self.process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        return f"{tail(self.log_path, num_lines)}\n{self.client.lost_by}".rstrip()


@dataclass(frozen=True, slots=True)
class JoinedServer:
    """A server that somebody else started and will end."""

    client: RemoteEngine

    def poll(self) -> int | None:
        return 1 if self.client.is_lost else None

    def kill(self) -> None:
        self.client.fail_all(ConnectionError(f"gave up the server at {self.client.endpoint}"))

    def stop(self) -> int:
        return 0

    def log_tail(self) -> str:
        where = f"(a server joined at {self.client.endpoint}; its log is where it was started)"
        return f"{where}\n{self.client.lost_by}".rstrip()


def start_server(
    command: Sequence[str], *, variables: Mapping[str, str], url: str, log_path: Path, name: str, timeout_s: float
) -> "subprocess.Popen[bytes]":
    """Start a server and wait until it is healthy; blocking. Its keeper ends it when this process is gone.

    Raises RuntimeError with the tail of its log.
    """
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*keeper_of(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | variables,
            cwd=log_path.parent,
            start_new_session=True,
        )
    if wait_healthy(url, timeout_s, is_alive=lambda: process.poll() is None):
        return process
    code = process.poll()
    late = f"was not healthy within {timeout_s:g} s" if still_wanted() else "was told to end"
    how = f"exited with code {code}" if code is not None else late
    signal_group(process, signal.SIGKILL)
    process.wait()
    raise RuntimeError(f"engine {name!r} {how}; the end of {log_path}:\n{tail(log_path, 20)}")


def wait_healthy(url: str, timeout_s: float, *, is_alive: Callable[[], bool] = lambda: True) -> bool:
    """Ask `/health` until it answers 200, the server dies, nobody wants it any more or the time is up; blocking."""
    deadline = time.monotonic() + timeout_s
    # As the client asks later on: straight, whatever http_proxy says.
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while is_alive() and still_wanted() and time.monotonic() < deadline:
        with suppress(OSError, HTTPException), straight.open(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return True
        time.sleep(LOOK_S)
    return False


def free_port() -> int:
    """A port of loopback that nobody listens on now; who takes it first has it, and a restart asks again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def signal_group(process: "subprocess.Popen[bytes]", sign: signal.Signals) -> None:
    """To the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)
