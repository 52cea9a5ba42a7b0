"""What one run came to, from its metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from headway.config import RunConfig
from headway.planner.collapse import collapsed_at

State = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run stopped: `diverged` on gradients that were not finite, `failed` for any other reason."""

    state: State
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run that finished or diverged. Accuracies are held out; None where nothing was measured."""

    start: float | None
    """Accuracy of version 0."""
    end: float | None
    """Of the last version; 0 for a run that diverged, whatever it had before."""
    best: float | None
    area: float | None
    """Under the curve of accuracy over steps, ÷ steps: the mean accuracy of the run's time, by trapezoids. From
    where the run diverged it is 0."""
    steps_to_goal: int | None
    """Version of the first evaluation at or above the goal; None where none was."""
    seconds_to_goal: float | None
    """Of training until that version, without the first step of a process, which holds its start. A step trained again
    after a kill counts the time it took at first; None where that is unknown."""
    collapsed_at: int | None
    """Step from which the run stays collapsed; None for one that held."""
    reward: float | None
    """Training reward, mean over the last tenth of the steps."""
    staleness: float | None
    """Of tokens, mean over the last three quarters of the steps."""
    ess: float | None
    """`ess_tokens`, over the same steps."""
    k3: float | None
    """`k3_behavior_policy`, over the same steps."""
    cosine: float | None
    """`grad_cosine`, over the same steps."""
    seconds: float
    """Of training."""
    curve: dict[int, float]
    """Accuracy by version."""

    @property
    def collapsed(self) -> bool:
        return self.collapsed_at is not None


def read_outcome(records: Sequence[Mapping[str, Any]], config: RunConfig, *, goal: float, finished: bool) -> Outcome:
    """Sum up the records of `metrics.jsonl`."""
    steps = [r for r in records if r["kind"] == "step"]
    curve = accuracy_curve(records)
    scores = list(curve.values())
    reached = next((version for version, score in curve.items() if score >= goal), None)
    late = steps[len(steps) // 4 :]
    lost_at = None if finished else len(steps)
    return Outcome(
        start=curve.get(0),
        end=(scores[-1] if finished else 0.0) if scores else None,
        best=max(scores, default=None),
        area=_area(curve, config.num_steps, lost_at),
        steps_to_goal=reached,
        seconds_to_goal=None if reached is None else _seconds_to(reached, steps),
        collapsed_at=collapsed_at([s["reward"] for s in steps], curve, num_steps=config.num_steps, finished=finished),
        reward=_mean(steps[-max(1, config.num_steps // 10) :], "reward"),
        staleness=_mean(late, "staleness_token_mean"),
        ess=_mean(late, "ess_tokens"),
        k3=_mean(late, "k3_behavior_policy"),
        cosine=_mean(late, "grad_cosine"),
        seconds=float(sum(step.get("step_s", 0.0) for step in steps)),
        curve=curve,
    )


def accuracy_curve(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Held-out accuracy by version, in order; where both splits were asked, over the prompts of both."""
    asked: dict[int, list[tuple[float, int]]] = {}
    for record in records:
        if record["kind"] == "evaluation" and record["split"] != "train":
            asked.setdefault(record["policy_version"], []).append((record["accuracy"], record["num_prompts"]))
    return {
        version: sum(accuracy * n for accuracy, n in parts) / sum(n for _, n in parts)
        for version, parts in sorted(asked.items())
    }


def _area(curve: Mapping[int, float], num_steps: int, lost_at: int | None) -> float | None:
    """∫ accuracy dt ÷ T; before the first evaluation and after the last one the accuracy is taken to stand.

    From step `lost_at` on, where the run diverged, it is 0.
    """
    if not curve:
        return None
    versions = [0, *curve, num_steps if lost_at is None else max(lost_at, *curve)]
    scores = [next(iter(curve.values())), *curve.values(), list(curve.values())[-1]]
    return float(np.trapezoid(scores, versions)) / num_steps


def _seconds_to(version: int, steps: Sequence[Mapping[str, Any]]) -> float | None:
    counted = [step for step in steps if step["step"] < version]
    if len(counted) < version or any("step_s" not in step for step in counted[1:]):
        return None
    return float(sum(step["step_s"] for step in counted[1:] if step["step_s"] != step.get("elapsed_s")))


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return fmean(values) if values else None
