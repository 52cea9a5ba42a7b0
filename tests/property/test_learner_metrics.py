"""What a learner logs: every metric that a setting adds is documented, and the guard sees every method's distance."""

from pathlib import Path
from typing import Any

import pytest
from test_learner import batch, learner
from test_learner_entropy import reported
from test_learner_routing import learner as mixture
from test_learner_routing import routed_batch

from headway.algorithms.diagnostics import QUADRANTS
from headway.training.guard import Guard, Limits

METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def of_guard() -> Any:
    guard = Guard(Limits(window=2, ess=1.1), action="lower_lr", max_staleness=4)
    return learner(guard=guard).train(batch(1))


CASES = {
    "routing_agreement": lambda: mixture().train(routed_batch(1)),
    "lr_scale": lambda: learner(vcpo_lr_scale=True).train(batch(1)),
    "behavior_entropy_error_bias": lambda: learner("estr", behavior_entropy="learner").train(reported(1)),
    "guard_lr_scale": of_guard,
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_setting_adds_to_a_step_is_documented(name: str):
    found = set(CASES[name]().metrics)
    assert name in found
    for quadrant in QUADRANTS:
        found = {each.replace(quadrant, "<quadrant>") for each in found}
    assert {each for each in found if f"`{each}`" not in METRICS} == set()


@pytest.mark.parametrize("algorithm", ["reinforce", "spo", "asympo"])
def test_a_loss_that_reads_no_log_probs_of_the_sampler_says_how_far_it_is_all_the_same(algorithm: str):
    found, clipped = (learner(name).train(batch(1)).metrics for name in (algorithm, "grpo"))
    for name in ("mean_abs_delta", "k3_behavior_policy", "ess_tokens", "ess_responses"):
        assert found[name] == pytest.approx(clipped[name], rel=1e-5) and found[name] != 0


def test_the_guard_warns_of_a_method_that_reads_no_log_probs_of_the_sampler():
    watched = learner("reinforce", guard=Guard(Limits(window=1, k3=1e-9), action="warn", max_staleness=4))
    assert watched.train(batch(1)).metrics["guard_signs"] > 0
