"""What the commands say: text as it is, and only what is true of the command."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.table import Table
from typer.testing import CliRunner

from headway.cli import app
from headway.errors import AccessRefused
from headway.report import terminal
from headway.runtime import compare, learners, noise, offline, replay, run_folder, wiring


def said(*arguments: object) -> str:
    """Both streams, whatever the width of the terminal."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return " ".join(result.output.split())


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def finish(folder: Any, config: object, *, log: object, say: Callable[[str], None]) -> tuple[Table, bool]:
        say(f"engine of {folder.path} [b]restarts[/b]")
        table = Table("where")
        table.add_row("[i]")
        return table, True

    monkeypatch.setattr(wiring, "run_to_end", finish)
    run = tmp_path / "runs" / "[a]"
    text = said("train", f"--run={run}").replace(" ", "")
    assert "runs/[a][b]restarts[/b]" in text and "│[i]" in text
    assert f"runfolder:{run}checkpoint:{run}/checkpoints" in text


def test_what_evaluation_and_measurement_say_is_no_markup_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, say: Callable[[str], None], **__: object) -> None:
        say("1 of 2 episodes failed; the last: [/red] is no tag")
        raise KeyboardInterrupt

    for module, name in ((offline, "evaluate_target"), (noise, "measure_noise")):
        monkeypatch.setattr(module, name, failing)
    for command in (["eval", "runs/[a]"], ["doctor", "--engine=runs/[a]"]):
        assert "the last: [/red] is no tag" in said(*command)


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (AccessRefused("engine 'engine-0' refused: HTTP 401"), "engine 'engine-0' refused: HTTP 401"),
        (OSError(errno.EROFS, "Read-only file system", "/runs/a"), "'/runs/a'; let this user read and write there"),
        (OSError(errno.EACCES, "Permission denied", "/runs/a"), "let this user read and write there"),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "'/runs/a'; make room"),
    ],
)
def test_what_is_the_users_to_mend_has_no_traceback(
    error: OSError, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(wiring, "run_to_end", fail)
    assert f"error: {error}" in (text := said("train", f"--run={tmp_path / 'run'}")) and mend in text


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["train", "resume"])
@pytest.mark.parametrize(("module", "moment"), [(wiring, "run_to_end"), (terminal, "derived_table")])
def test_a_stopped_run_is_said_to_be_resumable(
    command: str, module: ModuleType, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    monkeypatch.setattr(module, moment, stop)
    first = said("train", f"--run={run}")
    told = first if command == "train" else said("resume", run)
    assert f"`headway resume {run}` continues the run" in told


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_before_the_loop_listens_is_said_too(
    sign: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped_in_the_start(*_: object, **__: object) -> None:
        os.kill(os.getpid(), sign)
        time.sleep(5)

    monkeypatch.setattr(wiring, "run_to_end", stopped_in_the_start)
    before = signal.signal(sign, signal.SIG_DFL if sign != signal.SIGINT else signal.default_int_handler)
    try:  # under nohup a hang-up is ignored, and stays so
        result = CliRunner().invoke(app, ["train", f"--run={tmp_path / 'run'}"])
    finally:
        signal.signal(sign, before)
    assert result.exit_code == 130
    assert f"`headway resume {tmp_path / 'run'}` continues the run" in " ".join(result.output.split())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stop_before_there_is_a_folder_promises_no_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_folder.RunFolder, "create", stop)
    assert said("train", f"--run={tmp_path / 'run'}").endswith("stopped")


def test_other_commands_that_are_stopped_promise_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    monkeypatch.setattr(wiring, "run_to_end", stop)
    said("train", f"--run={run}")
    for module, name in (
        *((offline, "evaluate_target"), (noise, "measure_noise"), (compare, "compare_run")),
        *((learners, "replay_learner"), (replay, "replay")),
    ):
        monkeypatch.setattr(module, name, stop)
    for command in (["eval", run], ["doctor", f"--engine={run}"], ["compare", run, "--no-plot"], ["replay", run]):
        text = said(*command)
        assert text.endswith("stopped") and "resume" not in text
