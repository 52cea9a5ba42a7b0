"""Algorithms measured on one recorded batch, against on-policy gradients from fresh samples of the same policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.algorithms import compute_advantages, policy_diagnostics
from headway.runtime.methods import Method
from headway.training.batching import Rows, micro_batches
from headway.training.gradient_noise import (
    Bootstrap,
    CosineFloor,
    bootstrap_cosine,
    by_unit,
    cosine_floor,
    jackknife_error,
    left_out_cosines,
    relative_variance,
)
from headway.training.gradients import (
    GroupGradients,
    Projection,
    gradient_cosine,
    group_gradients,
    plain_coefficients,
    token_loss,
    weight_metrics,
)
from headway.training.scoring import score_rows


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The on-policy gradient of one (advantage, reduction), from fresh samples. See docs/compare.md."""

    name: str
    grad_norm: float
    relative_variance: float | None
    floor: CosineFloor


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One algorithm on one recorded batch. See docs/compare.md."""

    algorithm: str
    reference: str
    loss: float
    grad_norm: float
    cosine: float
    cosine_se: float | None
    """None where the batch or the reference has fewer than two prompts that move anything."""
    bootstrap: Bootstrap | None
    """The cosine over resampled prompts."""
    of_fresh: float | None
    """None when fresh data itself finds no direction."""
    difference: float
    difference_se: float | None
    relative_variance: float | None
    weights: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Every algorithm on the batch of one step."""

    step: int
    policy_version: int
    checkpoint: int
    """The version whose checkpoint was loaded; the steps from there to `step` were trained again."""
    batch: Mapping[str, float]
    projection_error: float
    """Largest |projected − exact cosine| over the algorithms."""
    references: tuple[ReferenceResult, ...]
    algorithms: tuple[MethodResult, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """An on-policy gradient and what the algorithms are compared with."""

    result: ReferenceResult
    gradients: GroupGradients
    by_prompt: Tensor
    """`[U, dims]`, projected."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An algorithm's result, short of the difference to the baseline."""

    result: MethodResult
    left_out: Tensor
    """`[U]`, its cosine without each prompt."""
    projection_error: float


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything of one step that all algorithms share."""

    model: Any
    score: Callable[[Rows], Tensor]
    max_tokens: int
    projection: Projection
    rows: Rows
    logprobs: Tensor
    """`[B, S]` of the recorded tokens under the policy being trained."""
    prompts: Tensor
    """`[G]`, 0 … U − 1."""
    fresh: Rows
    fresh_prompts: Tensor
    """`[K·G]`, 0 … U − 1."""
    num_fresh: int
    num_prompts: int
    """U."""

    def gradients(self, rows: Rows, coefficients: Tensor) -> GroupGradients:
        return group_gradients(
            self.score,
            list(self.model.parameters()),
            rows,
            coefficients,
            projection=self.projection,
            max_tokens=self.max_tokens,
        )

    def reference(self, objective: tuple[str, str, int | None]) -> Reference:
        """The on-policy gradient of one (advantage, reduction, l_max)."""
        advantage, reduction, l_max = objective
        gradients = self.gradients(self.fresh, plain_coefficients(advantage, reduction, self.fresh, l_max=l_max))
        projected = gradients.projected.cpu()
        rounds = torch.arange(len(projected)) // (len(projected) // self.num_fresh)
        result = ReferenceResult(
            name=objective_name(objective),
            grad_norm=gradients.norm,
            relative_variance=relative_variance(gradients.squared_norms, gradients.norm),
            floor=cosine_floor(projected, self.fresh_prompts, rounds),
        )
        return Reference(result, gradients, by_unit(projected, self.fresh_prompts, self.num_prompts))

    def judge(self, method: Method, reference: Reference) -> Judged:
        """One algorithm on the recorded batch."""
        parts = micro_batches(self.rows.lengths, max_tokens=self.max_tokens)
        loss = token_loss(method.algorithm, self.rows, self.logprobs, params=method.params, parts=parts)
        gradients = self.gradients(self.rows, loss.coefficients)
        by_prompt = by_unit(gradients.projected.cpu(), self.prompts, self.num_prompts)
        left_out = left_out_cosines(by_prompt, reference.by_prompt)
        cosine = gradient_cosine(gradients.total, reference.gradients.total)
        projected = torch.cosine_similarity(by_prompt.sum(0), reference.by_prompt.sum(0), dim=0)
        advantage, reduction, l_max = method.objective
        plain = plain_coefficients(advantage, reduction, self.rows, l_max=l_max)
        fresh = reference.result.floor.fresh
        result = MethodResult(
            algorithm=method.label,
            reference=reference.result.name,
            loss=loss.loss,
            grad_norm=gradients.norm,
            cosine=cosine,
            cosine_se=jackknife_error(left_out),
            bootstrap=bootstrap_cosine(by_prompt, reference.by_prompt),
            of_fresh=cosine / fresh if fresh > 0 else None,
            difference=0.0,
            difference_se=0.0,
            relative_variance=relative_variance(gradients.squared_norms, gradients.norm),
            weights=weight_metrics(loss, plain, self.rows, self.logprobs),
            metrics=loss.metrics,
        )
        return Judged(result, left_out, abs(float(projected) - cosine))


def objective_name(objective: tuple[str, str, int | None]) -> str:
    """How a reference is called: every part of its objective that is set, so that no two share a name.

    >>> objective_name(("grpo", "fixed", 64))
    'grpo, fixed, l_max 64'
    """
    advantage, reduction, l_max = objective
    return f"{advantage}, {reduction}" + (f", l_max {l_max}" if l_max is not None else "")


def score_with(model: Any, settings: Mapping[str, Any], rows: Rows) -> Tensor:
    """Log-probs `[b, s]` as the learner takes them; `settings` are those of `score_rows`."""
    return score_rows(model, rows, **settings)[0]


@torch.no_grad()
def score_all(model: Any, settings: Mapping[str, Any], rows: Rows, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy `[B, S]` on the CPU, in passes of at most `max_tokens`."""
    logprobs, entropy = torch.zeros(2, *rows.input_ids.shape).unbind()
    for part in micro_batches(rows.lengths, max_tokens=max_tokens):
        for into, found in zip((logprobs, entropy), score_rows(model, rows.select(part), **settings), strict=True):
            into[part, : found.shape[1]] = found.float().cpu()
    return logprobs, entropy


def batch_facts(rows: Rows, logprobs: Tensor, policy_version: int) -> dict[str, float]:
    """What the batch is, whatever the algorithm: staleness, distance of the policy, groups that teach nothing."""
    advantages, facts = compute_advantages("grpo", rewards=rows.rewards, group=rows.group)
    staleness = (policy_version - rows.versions)[rows.mask].float()
    facts |= {"staleness_token_mean": staleness.mean(), "staleness_token_max": staleness.max()}
    if rows.behavior_logprobs is not None:
        spread = advantages.unsqueeze(1).expand_as(logprobs)
        facts |= policy_diagnostics(logprobs, rows.behavior_logprobs, spread, rows.mask)
    return {name: float(value) for name, value in facts.items()}


def with_differences(judged: Sequence[Judged], baseline: str) -> tuple[MethodResult, ...]:
    """Each cosine minus the baseline's; the error of the difference is smaller than either's, for they share data."""
    base = next(one for one in judged if one.result.algorithm == baseline)
    return tuple(
        replace(
            one.result,
            difference=one.result.cosine - base.result.cosine,
            difference_se=jackknife_error(one.left_out - base.left_out),
        )
        for one in judged
    )
