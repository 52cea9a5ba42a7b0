"""`headway doctor --engine`: a real engine process against the learner's own scoring."""

import json
from pathlib import Path

from typer.testing import CliRunner

from headway.cli import app

SETS = ["--set=task.options.digits=1", "--set=engines.num_slots=8", "--set=engines.max_length=32"]


def test_the_noise_floor_of_the_built_in_engine_is_rounding_alone(model: Path):
    result = CliRunner().invoke(app, ["doctor", f"--engine={model}", "--size=12", "--json", *SETS])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["engine_dtype"], found["learner_dtype"], found["num_responses"]) == ("float32", "float32", 12)
    floor = found["floor"]
    assert floor["num_tokens"] >= 12
    assert 0 <= floor["mean_abs_delta"] <= floor["p99_abs_delta"] <= floor["max_abs_delta"] < 1e-4
    assert all(cut["share"] == 0 for cut in floor["cuts"])


def test_a_model_that_is_not_there_is_named(tmp_path: Path):
    result = CliRunner().invoke(app, ["doctor", "--engine=./nowhere", *SETS])
    assert result.exit_code == 1
    assert "no model folder at ./nowhere" in result.output
