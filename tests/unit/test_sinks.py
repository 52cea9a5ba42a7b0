"""Sinks get every step once, and whatever they do, the run does not notice."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway.report.sinks import SINKS, SinkMissing, Sinks, numbers_of, require_sinks, sinks_of


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": number, "policy_version": number, "reward": 0.5 + number, "token_staleness": {}}
    return record | changes


def evaluation(version: int) -> dict[str, Any]:
    return {"kind": "evaluation", "split": "validation", "policy_version": version, "accuracy": 0.25, "n": None}


class Kept:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        super().log(numbers, step)
        raise OSError("no space left")


def send(sinks: Mapping[str, Callable[[], Any]], *records: dict[str, Any], first_step: int = 0) -> list[str]:
    said: list[str] = []
    out = Sinks(sinks, first_step=first_step, say=said.append)
    for record in records:
        out.log(record)
    out.close()
    return said


def test_only_numbers_are_sent_and_each_says_where_it_comes_from():
    assert numbers_of(step(3, redone=True)) == {"train/reward": 3.5}
    assert numbers_of(evaluation(2)) == {"validation/accuracy": 0.25}


def test_a_resumed_run_sends_no_step_again():
    first, second = Kept(), Kept()
    assert send({"a": lambda: first}, step(0), evaluation(0), step(1), step(2)) == []
    # Killed after step 2, with its last checkpoint at 1: steps 1 and 2 are trained again, 3 is new.
    assert send({"a": lambda: second}, step(1, redone=True), step(2, redone=True), step(3), first_step=3) == []
    assert [number for number, _ in first.rows + second.rows] == [0, 0, 1, 2, 3]
    assert first.closed and second.closed


def test_a_sink_that_raises_is_named_once_and_the_others_go_on():
    broken, kept = Broken(), Kept()

    def refuses() -> Kept:
        raise RuntimeError("no server")

    said = send({"broken": lambda: broken, "refuses": refuses, "kept": lambda: kept}, step(0), step(1))
    assert len(kept.rows) == 2 and len(broken.rows) == 1
    assert [line.split(" failed")[0] for line in said] == ["sink refuses", "sink broken"]
    assert "no space left" in said[1] and "metrics.jsonl goes on" in said[1]


def test_a_sink_that_hangs_loses_records_and_delays_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.report.sinks.MAX_WAITING", 2)
    monkeypatch.setattr("headway.report.sinks.CLOSE_S", 0.05)
    forever = threading.Event()

    class Hangs(Kept):
        def log(self, numbers: Mapping[str, float], step: int) -> None:
            forever.wait()

    said = send({"hangs": Hangs}, *(step(number) for number in range(10)))
    forever.set()
    assert [line.split(":")[0] for line in said] == [
        "the sinks do not keep up",
        "the sinks did not finish within 0 s; metrics.jsonl has everything",
    ]


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.report.sinks.find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(SinkMissing, match=r"pip install 'headway\[wandb\]'"):
        require_sinks(["tensorboard", "wandb"])


def through(name: str, run: Path) -> None:
    """Three steps and an evaluation, and after a kill the last step again and one more."""
    for records, first_step in (
        ((step(0), step(1), evaluation(1), step(2)), 0),
        ((step(2, redone=True), step(3)), 3),
    ):
        if first_step and name == "wandb":
            time.sleep(1.0)  # it names the files of a run by the second
        opened = sinks_of([name], run, project="headway-test", settings={"algorithm": "grpo"})
        assert send(opened, *records, first_step=first_step) == []


def test_every_sink_of_the_settings_has_an_opener():
    from headway.config_sections import ReportConfig

    assert "tensorboard" in str(ReportConfig.model_fields["sinks"].annotation)
    assert all(f"'{name}'" in str(ReportConfig.model_fields["sinks"].annotation) for name in SINKS)


def test_tensorboard_reads_back_every_step_once(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    through("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/reward")] == [(i, 0.5 + i) for i in range(4)]
    assert [(e.step, e.value) for e in found.Scalars("validation/accuracy")] == [(1, 0.25)]


def logged(data: bytes) -> Iterator[bytes]:
    """Records of a W&B file: a header of 7 bytes, then blocks of 32 kB of (checksum, length, type) and a piece."""
    place, pieces = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def test_wandb_writes_offline_files_of_one_run_and_reads_back_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    through("wandb", tmp_path)
    wandb.teardown()  # its service closes a run's file after `finish` has returned
    steps, ids = [], set()
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for data in logged(file.read_bytes()):
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  made at run time
            record.ParseFromString(data)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/reward" in values:
                steps.append(int(values["step"]))
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
    assert steps == [0, 1, 2, 3] and len(ids) == 1


@pytest.mark.timeout(600)  # importing trackio alone takes half a minute on a busy machine
def test_trackio_keeps_every_step_once_in_its_own_database(tmp_path: Path):
    pytest.importorskip("trackio")
    import sqlite3
    import subprocess
    import sys

    # A process of its own: trackio decides on import where its database lies.
    code = "import sys, pathlib, test_sinks; test_sinks.through('trackio', pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "db"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    (database,) = (tmp_path / "db").glob("headway-test*.db")
    with closing(sqlite3.connect(database)) as db:
        rows = db.execute("SELECT step, CAST(metrics AS TEXT) FROM metrics ORDER BY id").fetchall()
    assert [step for step, numbers in rows if "train/reward" in numbers] == [0, 1, 2, 3]
