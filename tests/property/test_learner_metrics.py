"""Every metric that a learner logs because of a setting is in docs/metrics.md."""

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
