"""`learner.head`: measured once, said, kept in the run folder, and taken up again from there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from headway.config import ConfigError, load_config
from headway.models.head_timing import HeadShape, Timing
from headway.models.tiles import EAGER, HEADS
from headway.runtime import head as module
from headway.runtime.head import head_shape, settle_head, tiles_of
from headway.runtime.run_folder import RunFolder


def a_run(tmp_path: Path, *overrides: str) -> tuple[RunFolder, Any, str]:
    config = load_config(None, overrides)
    model = tmp_path / "model"
    Qwen3Config(vocab_size=300, hidden_size=16).save_pretrained(model)
    return RunFolder.create(tmp_path / "run", config), config, str(model)


def test_on_cpu_auto_is_eager_and_kept(tmp_path: Path) -> None:
    folder, config, model = a_run(tmp_path, "learner.device=cpu")
    said: list[str] = []
    assert settle_head(config, folder, model, say=said.append).learner.head == "eager"
    assert not said
    assert RunFolder.open(folder.path)[1].learner.head == "eager"


def test_elsewhere_the_fastest_is_said_and_kept_for_resume_and_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, model = a_run(tmp_path, "batch_size=16", "group_size=4")
    asked: list[Any] = []

    def measure(heads: Any, shape: HeadShape, **settings: Any) -> dict[str, Timing | str]:
        asked.append((list(heads), shape, settings["dtype"]))
        return {"eager": Timing(0.002, 10), "compiled": Timing(0.001, 10), "eager_wide": "out of memory"}

    monkeypatch.setattr(module, "pick_device", lambda name: "cuda")
    said: list[str] = []
    settled = settle_head(config, folder, model, say=said.append, measure=measure)
    assert asked == [(list(HEADS), HeadShape(tokens=16 * 8, hidden=16, vocabulary=300), torch.bfloat16)]
    assert tiles_of(settled) == HEADS["compiled"]
    assert "compiled 1.0 ms" in said[0] and "out of memory" in said[0]
    assert json.loads(folder.head_path.read_text())["measured"]["eager"] == {"seconds": 0.002, "peak_bytes": 10}
    _, again = RunFolder.open(folder.path)
    assert again.learner.head == "compiled"
    assert settle_head(again, folder, model, say=said.append, measure=measure) == again and len(asked) == 1


def test_a_named_head_is_not_measured(tmp_path: Path) -> None:
    folder, config, model = a_run(tmp_path, "learner.head=eager_wide")
    assert settle_head(config, folder, model, say=print) is config
    assert tiles_of(config) == HEADS["eager_wide"] and not folder.head_path.exists()


def test_before_anything_is_chosen_auto_is_eager() -> None:
    assert tiles_of(load_config(None)) == EAGER


def test_a_damaged_choice_is_refused(tmp_path: Path) -> None:
    folder, _, _ = a_run(tmp_path)
    folder.head_path.write_text('{"head": "fast"}')
    with pytest.raises(ConfigError, match=r"learner\.head"):
        RunFolder.open(folder.path)


def test_no_more_tokens_than_a_micro_batch_are_timed(tmp_path: Path) -> None:
    _, config, model = a_run(tmp_path, "learner.micro_batch_tokens=100")
    assert head_shape(config, model).tokens == 100
