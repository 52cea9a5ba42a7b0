"""The example stays what it says: one short file, no Headway, and it learns."""

import importlib.util
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_async.py"


def test_the_minimal_example_is_short_stands_alone_and_learns():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 150
    assert "import headway" not in text and "from headway" not in text
    spec = importlib.util.spec_from_file_location("minimal_async", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["STEPS"] = 80
    torch.set_num_threads(1)
    assert module.main() > 0.4  # 0.1 by chance
