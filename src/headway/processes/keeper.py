"""Ends a server with its parent, where the server would not: `python keeper.py PARENT COMMAND…`; imports no package.

Leads a process group of the server and all that it starts. Waits for: the server, and the clock. Shutdown: SIGTERM,
which it hands on; the server's end, whose exit code becomes its own; the death of PARENT, at which the group is ended.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_TICK_S = 0.25
_GRACE_S = 10.0


def keeper_of(parent: int) -> list[str]:
    """A command line without the command to be kept: not `-m`, for the server's PYTHONPATH and folder are its own."""
    return [sys.executable, "-I", __file__, str(parent)]


def keep(parent: int, command: Sequence[str]) -> int:
    """Run it to its end; the exit code. Does not return when `parent` is gone."""
    server = subprocess.Popen(command, env=os.environ | {"HEADWAY_PARENT": str(os.getpid())})
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    while os.getppid() == parent:
        with suppress(subprocess.TimeoutExpired):
            return server.wait(_TICK_S)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is in the group it killed")


if __name__ == "__main__":
    code = keep(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
