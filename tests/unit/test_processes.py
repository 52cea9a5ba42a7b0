"""Servers as child processes: what ends one, and what does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.processes.child import Child, start_child
from headway.processes.stops import stops_heeded

SERVER = """
import os, sys, time
from headway.processes.router import announce, bound_router, end_with_parent
end_with_parent()
with bound_router() as socket:
    announce(socket, lambda: sys.exit(7))
    time.sleep(600)  # one long call
"""

PARENT = """
import sys, time
from pathlib import Path
from headway.processes.child import start_child
child = start_child("busy_server", {}, what="it", log_path=Path(sys.argv[1]), start_timeout_s=60)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of children, with a module `busy_server`."""
    (tmp_path / "busy_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def busy_server(folder: Path) -> Child:
    return start_child("busy_server", {}, what="it", log_path=folder / "log", start_timeout_s=60)


def test_a_signal_to_the_whole_group_does_not_end_a_server_but_its_parent_does(path: Path):
    child = busy_server(path)
    for sign in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, sign)
    time.sleep(0.3)
    assert child.poll() is None
    assert child.stop(grace_s=20) == 7


def test_a_server_in_a_long_call_ends_when_its_parent_is_killed(path: Path):
    command = [sys.executable, "-c", PARENT, str(path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    server.wait(20)


def test_a_stop_that_comes_twice_at_once_is_one_stop(monkeypatch: pytest.MonkeyPatch):
    again: list[int] = []
    with stops_heeded(again=lambda: again.append(1)) as is_stopped:
        assert not is_stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert is_stopped() and not again
        monkeypatch.setattr("headway.processes.stops.ONE_STOP_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert again
