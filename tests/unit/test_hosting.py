"""Servers behind HTTP that are started here: nothing is left of one whose run is gone, or which nobody waits for."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.engine.hosting import ServerProcess, free_port, start_server
from headway.processes.child import start_child
from headway.runtime.local import EnginePool
from headway.runtime.signal import Signal
from headway.types import WeightRef

SERVER = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
subprocess.Popen(["sleep", "600"])  # a worker
assert int(os.environ["HEADWAY_PARENT"]) == os.getppid()
print("up", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""

PARENT = """
import os, subprocess, sys, time
from headway.processes.keeper import keeper_of
process = subprocess.Popen([*keeper_of(os.getpid()), sys.executable, "-c", sys.argv[1], "0"], start_new_session=True)
print(process.pid, flush=True)
time.sleep(600)
"""


def family(pid: int) -> list[psutil.Process]:
    keeper = psutil.Process(pid)
    return [keeper, *keeper.children(recursive=True)]


def test_a_server_and_its_workers_end_when_the_run_is_killed():
    command = [sys.executable, "-c", PARENT, SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        left = family(pid)
        assert len(left) == 3
        parent.kill()
    for process in left:
        process.wait(20)


def start(tmp_path: Path, script: str, timeout_s: float = 60.0) -> "subprocess.Popen[bytes]":
    port = free_port()
    return start_server(
        [sys.executable, "-c", script, str(port)],
        variables={},
        url=f"http://127.0.0.1:{port}",
        log_path=tmp_path / "log",
        name="it",
        timeout_s=timeout_s,
    )


def test_a_server_ends_in_order_with_all_that_it_started(tmp_path: Path):
    client: Any = None
    server = ServerProcess(start(tmp_path, SERVER), client, tmp_path / "log")
    left = family(server.process.pid)
    assert len(left) == 3 and server.process.poll() is None
    assert server.stop() == 128 + 15  # by the signal that its keeper handed on
    for process in left:
        process.wait(20)


def test_a_server_that_cannot_start_is_named_with_its_exit_code_and_log(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"engine 'it' exited with code 3; the end of (.|\n)*no GPU"):
        start(tmp_path, "import sys; print('no GPU', file=sys.stderr); sys.exit(3)")


def stopped_while_it_starts(launch: Any, began: Path) -> float:
    """Start a pool, give up as soon as `began` exists, and close it: how long that took."""

    async def main() -> float:
        options = {"num_slots": 1, "max_restarts": 0, "patience_s": 1.0, "stall_s": 1.0, "say": print}
        pool = EnginePool(launch, num_engines=1, logs=began.parent, signal=Signal(), **options)
        starting = asyncio.ensure_future(pool.start(WeightRef(0, "", "")))
        while not began.exists():
            await asyncio.sleep(0.05)
        starting.cancel()
        begun = time.monotonic()
        await pool.close()
        return time.monotonic() - begun

    return asyncio.run(main())


NEVER = "import sys, time; from pathlib import Path; Path('began').write_text(''); time.sleep(600)"


@pytest.mark.timeout(60)
def test_a_stop_does_not_wait_for_a_server_that_starts_and_leaves_nothing_of_it(tmp_path: Path):
    children = psutil.Process().children(recursive=True)
    assert stopped_while_it_starts(lambda *_: start(tmp_path, NEVER, 600.0), tmp_path / "began") < 20
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.timeout(60)
def test_nor_for_a_built_in_engine_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "never_listens.py").write_text(NEVER.replace("'began'", f"{str(tmp_path / 'began')!r}"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launch = lambda name, log: start_child("never_listens", {}, what=name, log_path=log, start_timeout_s=600.0)  # noqa: E731
    children = psutil.Process().children(recursive=True)
    assert stopped_while_it_starts(launch, tmp_path / "began") < 20
    assert psutil.Process().children(recursive=True) == children


class Late:
    """An engine that was started all the same."""

    def __init__(self) -> None:
        self.client, self.stopped = self, False

    def close(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True


def test_what_has_started_when_nobody_wants_it_any_more_is_stopped(tmp_path: Path):
    late = Late()

    def launch(name: str, log_path: Path) -> Late:
        (tmp_path / "began").touch()
        time.sleep(0.5)
        return late

    stopped_while_it_starts(launch, tmp_path / "began")
    assert late.stopped
