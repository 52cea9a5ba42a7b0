"""Starting an engine's server as a child process, and ending it."""

import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.engine.client import EngineClient
from headway.engine.messages import EngineSettings
from headway.processes.child import Server, Spawn, start_child


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running server and a client that talks to it."""

    child: Server
    client: EngineClient

    @property
    def pid(self) -> int:
        return self.child.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs; one that answers nonsense is as good as dead."""
        code = self.child.poll()
        if code is None and self.client.is_lost:
            self.child.kill()
        return code

    def kill(self) -> None:
        self.child.kill()

    def stop(self, grace_s: float = 3.0) -> int:
        """STOP, then SIGKILL when it has not exited within `grace_s`; returns the exit code."""
        self.client.close()
        return self.child.stop(grace_s)

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of what the server wrote to stderr."""
        return self.child.log_tail(num_lines)


def start_engine(
    settings: EngineSettings,
    name: str = "torch",
    log_path: Path = Path("engine.log"),
    *,
    start_timeout_s: float = 120.0,
    timeout_s: float = 60.0,
    token: str | None = None,
    spawn: Spawn = start_child,
) -> EngineProcess:
    """Start `python -m headway.engine.server` and wait until it listens; blocking, seconds.

    It has no weights until the first `client.update_weights`. Raises RuntimeError with the tail of its stderr when it
    exits or does not listen within `start_timeout_s`.
    """
    token = token or secrets.token_hex(16)
    variables = {"HEADWAY_ENGINE": msgspec.json.encode(settings).decode(), "HEADWAY_TOKEN": token}
    child = spawn(
        "headway.engine.server",
        variables,
        what=f"engine {name!r}",
        log_path=log_path,
        start_timeout_s=start_timeout_s,
    )
    client = EngineClient(child.endpoint, token, timeout_s=timeout_s, name=name, dtype=settings.dtype)
    return EngineProcess(child, client)
