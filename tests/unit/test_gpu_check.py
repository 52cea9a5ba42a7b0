"""The check of a CUDA machine ends in time, whatever hangs."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_that_hang_end_within_one_limit_and_each_is_reported(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def hang(device: str, quick: bool, clock: Any) -> dict[str, Any]:
        script.command(clock, "sh", "-c", "echo begun; sleep 60 & wait")
        raise AssertionError("it woke up")

    out = tmp_path / "out.json"
    monkeypatch.setattr(script, "PARTS", dict.fromkeys(script.PARTS, hang))
    monkeypatch.setattr(script, "PART_S", 1.0)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--limit-s", "1.5", "--out", str(out)])
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        script.main()
    assert time.monotonic() - begun < 20
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["tests", "head", "engine", "run"]
    assert "not done within" in parts["tests"]["error"] and "no time was left" in parts["run"]["error"]
