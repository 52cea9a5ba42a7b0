"""A run folder stays one run: what may not be edited between two commands, and what may."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headway.config import parse_config
from headway.runtime.run_folder import RunFolder, RunFolderError, write_atomically

LOCAL = {"teacher": "some/model", "method": "mc_clipped", "params": {"clip": [0.2, 0.2]}}
SERVER = {"teacher": "http://127.0.0.1:8000", "served_model": "big", "tokenizer": "some/model", "num_draws": 1}


def edited(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> RunFolder:
    """A run that was started with some settings and is opened with others."""
    started = RunFolder.create(folder, parse_config(before))
    started.config_path.write_text(parse_config(after).to_toml())
    return RunFolder.open(folder)[0]


def reopened(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> RunFolder:
    """The same for the `distill` section alone."""
    return edited(folder, {"distill": before}, {"distill": after})


def test_other_experts_make_another_run(tmp_path: Path):
    with pytest.raises(RunFolderError, match=r"has routing_replay = False, but the run was started with True; set it"):
        edited(tmp_path / "run", {"routing_replay": True}, {"routing_replay": False})


@pytest.mark.parametrize(
    ("algorithm", "params", "is_part"),
    [
        ("sat", {}, True),
        ("sat_gspo", {"scope": "micro_batch"}, True),
        ("sat", {"scope": "batch"}, False),
        ("grpo", {}, False),
    ],
)
def test_the_size_of_a_pass_is_part_of_a_run_where_the_loss_sees_it(
    algorithm: str, params: dict[str, Any], is_part: bool, tmp_path: Path
):
    before = {"algorithm": algorithm, "algorithm_params": params, "learner": {"micro_batch_tokens": 8192}}
    after = before | {"learner": {"micro_batch_tokens": 64, "num_threads": 2}}
    if not is_part:
        edited(tmp_path / "run", before, after)
        return
    with pytest.raises(RunFolderError, match=r"learner.micro_batch_tokens = 64, but the run was started with 8192"):
        edited(tmp_path / "run", before, after)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("params", {"clip": [0.1, 0.2]}),
        ("weight", 0.5),
        ("reward_weight", 0.5),
        ("method", "mc_recomputed"),
        ("teacher", "other/model"),
    ],
)
def test_another_loss_or_teacher_is_another_run(tmp_path: Path, key: str, value: Any):
    with pytest.raises(RunFolderError, match=rf"config.toml has distill.{key} = .*, but the run was started with"):
        reopened(tmp_path / "run", LOCAL, LOCAL | {key: value})


def test_a_server_may_come_back_at_another_address_but_not_with_another_model(tmp_path: Path):
    reopened(tmp_path / "moved", SERVER, SERVER | {"teacher": "https://elsewhere:9000"})
    with pytest.raises(RunFolderError, match=r"distill.served_model = small, but the run was started with big"):
        reopened(tmp_path / "other", SERVER, SERVER | {"served_model": "small"})
    with pytest.raises(RunFolderError, match=r"distill.teacher = some/model"):
        reopened(tmp_path / "local", SERVER, SERVER | {"teacher": "some/model"})


def test_how_the_teacher_is_asked_may_be_edited(tmp_path: Path):
    reopened(tmp_path / "run", LOCAL, LOCAL | {"timeout_s": 600, "batch_tokens": 64, "num_threads": 2})


def test_a_run_from_before_a_setting_existed_is_opened_as_ever(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", parse_config({"distill": LOCAL}))
    identity = json.loads(folder.identity_path.read_text())
    for key in ("params", "weight", "reward_weight", "served_model"):
        del identity["distill"][key]
    folder.identity_path.write_text(json.dumps(identity))
    RunFolder.open(folder.path)
    for key in ("distill", "learner", "routing_replay"):
        del identity[key]
    folder.identity_path.write_text(json.dumps(identity))
    RunFolder.open(folder.path)


def test_a_damaged_identity_is_named(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", parse_config({"distill": LOCAL}))
    for section in ("distill", "learner"):
        folder.identity_path.write_text(json.dumps({"max_staleness": 4, section: 3}))
        with pytest.raises(RunFolderError, match=rf"identity.json is damaged \({section} is no table\)"):
            RunFolder.open(folder.path)


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = RunFolder.create(tmp_path / "run", parse_config({}))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFolderError, match=r"cannot write .*run/lock: .*No space left.*make room"):
        folder.lock()
    monkeypatch.undo()
    with folder.lock() as file, pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        assert Path(file.name).read_text() == str(os.getpid())
        folder.lock()


def test_a_file_that_does_not_fit_is_named_and_the_one_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.toml"
    write_atomically(path, "before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*config.toml'"):
        write_atomically(path, "after")
    assert path.read_text() == "before"


def test_a_place_that_can_hold_no_run_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/run", "dangling", "x" * 300):
        with pytest.raises(RunFolderError, match=r"cannot hold a run: .*; give --run another place"):
            RunFolder.create(tmp_path / name, parse_config({}))
    RunFolder.create(tmp_path / "a [b]", parse_config({}))
    with pytest.raises(RunFolderError, match=r"`headway resume '.*/a \[b\]'` continues it"):
        RunFolder.create(tmp_path / "a [b]", parse_config({}))


def test_a_new_run_does_not_take_over_what_is_left_of_another(tmp_path: Path):
    for name in ("ledger.sqlite", "checkpoints/version-000003"):
        folder = RunFolder.create(tmp_path / name[0], parse_config({}))
        folder.config_path.unlink()
        (folder.path / name).mkdir()
        with pytest.raises(RunFolderError, match=r"holds a run without its config.toml; restore it"):
            RunFolder.create(folder.path, parse_config({}))
    cut_short = RunFolder.create(tmp_path / "early", parse_config({}))  # killed before there was a config.toml
    cut_short.config_path.unlink()
    RunFolder.create(cut_short.path, parse_config({}))
