"""The interpreter of an engine's server is looked at before anything starts."""

from pathlib import Path

import pytest

from headway.config import ConfigError, parse_config
from headway.runtime.launch import check_engine


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("what", ["a folder", "nothing", "a text"])
def test_what_is_no_interpreter_is_refused_by_name(tmp_path: Path, engine: str, what: str):
    python = tmp_path if what == "a folder" else tmp_path / "python"
    if what == "a text":
        python.write_text("no program")
    config = parse_config({"engine": engine, "engines": {"python": str(python), "on_update": "recompute"}})
    with pytest.raises(ConfigError, match=r"is no Python interpreter; name that of an environment"):
        check_engine(config)
