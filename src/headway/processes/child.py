"""A server as a child process: `python -m module`, which prints where it listens and then serves."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LOOPBACK = "127.0.0.1"

STOP = signal.SIGUSR1
"""Asks a server to end. Not SIGTERM: whoever sends that to the whole group means the run, which stops in order."""

LOOK_S = 0.1
"""How often a start is asked whether it is wanted still."""

WANTED: ContextVar[Callable[[], bool]] = ContextVar("WANTED", default=lambda: True)
"""Whether what is started in this context is wanted still; a context goes with `asyncio.to_thread`."""


def still_wanted() -> bool:
    """What WANTED says."""
    return WANTED.get()()


class Server(Protocol):
    """A server that was started for this run, on this machine or another; no call blocks for long but `stop`."""

    @property
    def endpoint(self) -> str: ...

    @property
    def pid(self) -> int:
        """Of its process, on its machine."""
        ...

    @property
    def log_path(self) -> Path: ...

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        ...

    def kill(self) -> None:
        """Make `poll` say so soon."""
        ...

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for that."""
        ...

    def stop(self, grace_s: float = 3.0) -> int:
        """End it; the exit code."""
        ...

    def log_tail(self, num_lines: int = 20) -> str: ...


class Spawn(Protocol):
    """Starts a server somewhere and waits until it listens; `start_child` does it here. Raises RuntimeError.

    `is_wanted` is asked several times a second meanwhile; once it is not, the start is given up.
    """

    def __call__(
        self,
        module: str,
        variables: Mapping[str, str],
        *,
        what: str,
        log_path: Path,
        start_timeout_s: float,
        is_wanted: Callable[[], bool] = ...,
    ) -> Server: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A running server.

    Example: `Child(process, "tcp://127.0.0.1:40123", Path("logs/engine-0.log"))`
    """

    process: "subprocess.Popen[bytes]"
    endpoint: str
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.send_signal(STOP)

    def stop(self, grace_s: float = 3.0) -> int:
        """STOP, then SIGKILL when it has not exited within `grace_s`; returns the exit code."""
        self.process.send_signal(STOP)
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of what the server wrote to stderr."""
        return tail(self.log_path, num_lines)


def start_child(
    module: str,
    variables: Mapping[str, str],
    *,
    what: str,
    log_path: Path,
    start_timeout_s: float,
    is_wanted: Callable[[], bool] = still_wanted,
    host: str = LOOPBACK,
) -> Child:
    """Start it and wait until it listens; blocking, seconds. `host`: the address of this machine that it binds.

    Raises RuntimeError, beginning with `what` and ending with its stderr, when it exits, is late or no longer wanted.
    """
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | dict(variables) | {"HEADWAY_PARENT": str(os.getpid()), "HEADWAY_HOST": host},
        )
    line = _read_line(process, start_timeout_s, is_wanted)
    if not line:
        code = process.poll()
        process.kill()
        process.wait()
        late = f"did not listen within {start_timeout_s:g} s" if is_wanted() else "was told to end"
        how = f"exited with code {code}" if code is not None else late
        raise RuntimeError(f"{what} {how}; the end of {log_path}:\n{tail(log_path, 20)}")
    return Child(process, json.loads(line)["endpoint"], log_path)


def _read_line(process: "subprocess.Popen[bytes]", timeout_s: float, is_wanted: Callable[[], bool]) -> bytes:
    """The first line of its stdout; empty when it exits, is late or is not wanted any more."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    with process.stdout as stdout:
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([stdout], [], [], min(LOOK_S, left_s))[0]:
                if not left_s or not is_wanted():
                    return b""
                continue
            if not (chunk := os.read(stdout.fileno(), 4096)):
                process.wait(1.0)  # its stdout is closed, so it is about to exit
                return b""
            line += chunk
    return line


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
