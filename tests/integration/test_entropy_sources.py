"""ESTR end to end with every source of the behavior entropy, and its recorded batches trained again bit by bit."""

from pathlib import Path

import pytest
from runs import assert_moving, records, train

from headway.config import ConfigError, parse_config
from headway.runtime.checks import check, check_algorithm
from headway.runtime.learners import replay_learner
from headway.runtime.replay import replay
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import open_task

ERRORS = {"behavior_entropy_error_mean", "behavior_entropy_error_max", "behavior_entropy_error_bias"}
SHORT = {"algorithm": "estr", "num_steps": 3, "record": True, "evaluation__test_size": 0, "evaluation__every": 0}


@pytest.mark.parametrize(
    ("source", "notice"),
    [
        ("engine", ""),
        ("topk_lower_bound", "a lower bound from the 5 most likely tokens stands for the entropy"),
        ("learner", "the entropy of the policy being trained stands for that of the policy that sampled"),
    ],
)
def test_estr_trains_and_replays_with(source: str, notice: str, model: Path, tmp_path: Path):
    result = train(tmp_path / "run", model, **SHORT, behavior_entropy=source, behavior_entropy_top=5)
    assert notice in " ".join(result.stdout.split())
    assert ("behavior_entropy =" in result.stdout) == bool(notice)
    steps = records(tmp_path / "run", "step")
    assert_moving(tmp_path / "run")
    assert all("masked_fraction" in step for step in steps)
    assert ERRORS & steps[0].keys() == (set() if source == "engine" else ERRORS)
    if source == "topk_lower_bound":
        assert all(step["behavior_entropy_error_bias"] == -step["behavior_entropy_error_mean"] < 0 for step in steps)
    folder, config = RunFolder.open(tmp_path / "run")
    assert replay(folder, replay_learner(folder, config)).exact


def test_a_bound_from_log_probs_that_the_engine_does_not_return_is_refused():
    config = parse_config(
        {"algorithm": "asympo", "engines": {"logprobs": False}, "behavior_entropy": "topk_lower_bound"}
    )
    with pytest.raises(
        ConfigError, match=r'engines\.logprobs = false; set it to true, or behavior_entropy to "learner"'
    ):
        check_algorithm(config)


def test_more_most_likely_tokens_than_there_are_tokens_are_refused(model: Path):
    config = parse_config(
        {"model": {"path": str(model)}, "behavior_entropy": "topk_lower_bound", "behavior_entropy_top": 58}
    )
    with pytest.raises(ConfigError, match="exceeds the model's vocabulary of 57 tokens"):
        check(config, open_task(config, say=print))
