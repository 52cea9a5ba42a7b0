"""Every method and every metric it logs stands in the documentation."""

from pathlib import Path

import pytest
import torch

from headway.algorithms import (
    ALGORITHMS,
    DISTILLATIONS,
    QUADRANTS,
    compute_advantages,
    compute_distillation_loss,
    compute_loss,
)

DOCS = Path(__file__).parents[2] / "docs"
METRICS = "\n".join(path.read_text() for path in DOCS.glob("metrics*.md"))
METHODS = (DOCS / "methods.md").read_text()

TENSOR = torch.full((2, 3), -1.0)


def undocumented(names: set[str]) -> set[str]:
    for quadrant in QUADRANTS:
        names = {name.replace(quadrant, "<quadrant>") for name in names}
    return {name for name in names if f"`{name}`" not in METRICS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_and_their_metrics_are_documented(name: str) -> None:
    _, metrics = compute_loss(
        name,
        logprobs=TENSOR,
        behavior_logprobs=TENSOR,
        behavior_entropy=-TENSOR,
        advantages=TENSOR,
        mask=-TENSOR,
        group=torch.zeros(2, dtype=torch.long),
    )
    assert undocumented(set(metrics)) == set()
    assert f"`{name}`" in METHODS


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_distillations_and_their_metrics_are_documented(name: str) -> None:
    scores = TENSOR.unsqueeze(-1)
    _, metrics = compute_distillation_loss(
        name, student_logprobs=scores, teacher_logprobs=scores, rollout_logprobs=scores, mask=-TENSOR
    )
    assert undocumented(set(metrics)) == set()
    assert f"`{name}`" in METHODS


def test_metrics_of_advantages_are_documented() -> None:
    _, metrics = compute_advantages("grpo", rewards=torch.ones(2), group=torch.zeros(2))
    assert undocumented(set(metrics)) == set()
