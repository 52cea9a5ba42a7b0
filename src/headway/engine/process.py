"""Starting an engine's server as a child process, and ending it."""

import json
import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.engine.client import EngineClient
from headway.engine.messages import EngineSettings


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running server and a client that talks to it."""

    process: subprocess.Popen[bytes]
    client: EngineClient
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()

    def stop(self, grace_s: float = 3.0) -> int:
        """SIGTERM, then SIGKILL when it has not exited within `grace_s`; returns the exit code."""
        self.client.close()
        self.process.terminate()
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of what the server wrote to stderr."""
        return tail(self.log_path, num_lines)


def start_engine(
    settings: EngineSettings,
    name: str = "torch",
    log_path: Path = Path("engine.log"),
    *,
    start_timeout_s: float = 120.0,
    timeout_s: float = 60.0,
    token: str | None = None,
) -> EngineProcess:
    """Start `python -m headway.engine.server` and wait until it listens; blocking, seconds.

    It has no weights until the first `client.update_weights`. Raises RuntimeError with the tail of its stderr when it
    exits or does not listen within `start_timeout_s`.
    """
    token = token or secrets.token_hex(16)
    settings = msgspec.structs.replace(settings, parent_pid=os.getpid())
    variables = {"HEADWAY_ENGINE": msgspec.json.encode(settings).decode(), "HEADWAY_TOKEN": token}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.engine.server"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | variables,
        )
    line = _read_line(process, start_timeout_s)
    if not line:
        code = process.poll()
        process.kill()
        process.wait()
        how = f"exited with code {code}" if code is not None else f"did not listen within {start_timeout_s:g} s"
        raise RuntimeError(f"engine {name!r} {how}; the end of {log_path}:\n{tail(log_path, 20)}")
    client = EngineClient(json.loads(line)["endpoint"], token, timeout_s=timeout_s, name=name, dtype=settings.dtype)
    return EngineProcess(process, client, log_path)


def _read_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """The first line of its stdout; empty when it exits or is late."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    with process.stdout as stdout:
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return b""
            if not (chunk := os.read(stdout.fileno(), 4096)):
                process.wait(1.0)  # its stdout is closed, so it is about to exit
                return b""
            line += chunk
    return line


def tail(path: Path, num_lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
