"""The class shown in docs/environments.md is a whole, working environment."""

import asyncio
import re
from pathlib import Path

import pytest

from headway.envs import make_environment
from headway.models.tiny import character_tokenizer
from headway.protocols import SupervisedEnvironment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_documented_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "my_page_tasks.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment("my_page_tasks:Repeat", tokenizer=character_tokenizer(), times=1)
    assert isinstance(environment, SupervisedEnvironment)
    prompt = environment.prompt("test", 0)
    right = str(prompt.data["answer"])
    turns = [asyncio.run(environment.start(prompt).step(text)) for text in (right, right * 2)]
    assert [(turn.reward, turn.observation) for turn in turns] == [(1.0, None), (0.0, None)]
    assert len(environment.examples("train")) == 720
