"""Distillation on finite caches: losses on log-probs gathered at the cached ids `[B, T, K]` (2606.24143).

States come from stale rollouts and their shift is not corrected: these are local losses. q is the teacher, pθ the
student, p_old the student that rolled out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.algorithms.diagnostics import Metrics, active_mean
from headway.algorithms.ratios import log_ratio
from headway.algorithms.weighted import outward_moving, second_moment_bound

PositionLoss = tuple[Tensor, Metrics]


def forward_kl_teacher_topk(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> PositionLoss:
    """Σ_{a ∈ topk(q)} q·(log q − log pθ), not renormalized. Gradient: −q at each cached id."""
    teacher = teacher_logprobs.exp()
    terms = teacher * (teacher_logprobs - student_logprobs)
    return terms.sum(-1), {"cached_mass": active_mean(teacher.sum(-1), mask)}


def reverse_kl_student_topk(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> PositionLoss:
    """Σ_{a ∈ topk(p_old)} pθ·(log pθ − log q). Gradient: pθ·(log pθ − log q + 1).

    The support is the stale student's: what it left out no weight can bring back.
    """
    student = student_logprobs.exp()
    terms = student * (student_logprobs - teacher_logprobs)
    return terms.sum(-1), {"cached_mass": active_mean(student.sum(-1), mask)}


def mc_recomputed(
    student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, rollout_logprobs: Tensor
) -> PositionLoss:
    """−(1/m) Σ_i ρ_i·sg(A_i), ρ = pθ/p_old, A = log q − log pθ now; no clip. The adopted estimator.

    Gradient: −ρ·A/m per draw, whose mean over draws from p_old is ∇KL(pθ‖q) where p_old covers pθ.
    """
    ratio = log_ratio(student_logprobs, rollout_logprobs).exp()
    return _mean_over_draws(ratio, _advantage(student_logprobs, teacher_logprobs), mask)


def mc_stale_advantage(
    student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, rollout_logprobs: Tensor
) -> PositionLoss:
    """−(1/m) Σ_i ρ_i·A_i with A = log q − log p_old, taken when the draws were made.

    Mean gradient: ∇[KL(pθ‖q) − KL(pθ‖p_old)], which rewards leaving p_old.
    """
    ratio = log_ratio(student_logprobs, rollout_logprobs).exp()
    return _mean_over_draws(ratio, teacher_logprobs - rollout_logprobs, mask)


def mc_clipped(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    clip: Sequence[float],
) -> PositionLoss:
    """−(1/m) Σ_i min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A), A recomputed and detached, `clip` = (ε_low, ε_high).

    Gradient: −ρ·A/m inside the clip, else 0.
    """
    low, high = 1.0 - clip[0], 1.0 + clip[1]
    ratio = log_ratio(student_logprobs, rollout_logprobs).exp()
    advantage = _advantage(student_logprobs, teacher_logprobs)
    above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    effective = torch.where(above, high, torch.where(below, low, ratio))
    loss, metrics = _mean_over_draws(effective, advantage, mask)
    return loss, metrics | {"stopped_fraction": _draw_fraction(above | below, mask)}


def mc_no_ratio(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> PositionLoss:
    """−(1/m) Σ_i (pθ/sg pθ)·sg(A_i): treats stale draws as fresh. Gradient: −A/m per draw."""
    ratio = (student_logprobs - student_logprobs.detach()).exp()
    return _mean_over_draws(ratio, _advantage(student_logprobs, teacher_logprobs), mask)


def mc_decoupled(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    proximal_logprobs: Tensor,
    cap: float,
) -> PositionLoss:
    """−(1/m) Σ_i w_i·u_i·sg(A_i), u = pθ/π_prox, w = sg(π_prox/p_old) and 0 above `cap`. Gradient: −w·u·A/m."""
    weight = log_ratio(proximal_logprobs, rollout_logprobs).exp()
    kept = weight <= cap
    ratio = log_ratio(student_logprobs, proximal_logprobs).exp()
    effective = torch.where(kept, weight * ratio, 0.0)
    loss, metrics = _mean_over_draws(effective, _advantage(student_logprobs, teacher_logprobs), mask)
    return loss, metrics | {"kept_fraction": _draw_fraction(kept, mask)}


def mc_m2po(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    budget: float,
    moment_bound: Tensor | None = None,
) -> PositionLoss:
    """−(1/m) Σ_i keep_i·ρ_i·sg(A_i): M2PO's mask on the draws (`m2po_loss`). Gradient: −ρ·A/m on kept draws."""
    delta = log_ratio(student_logprobs, rollout_logprobs)
    advantage = _advantage(student_logprobs, teacher_logprobs)
    square = delta.detach().square()
    outward = outward_moving(delta, advantage, mask.unsqueeze(-1))
    bound = second_moment_bound(square, outward, budget) if moment_bound is None else moment_bound
    dropped = outward & (square >= bound)
    loss, metrics = _mean_over_draws(torch.where(dropped, 0.0, delta.exp()), advantage, mask)
    return loss, metrics | {"kept_fraction": _draw_fraction(~dropped, mask)}


def mc_m2po_statistics(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    budget: float,
) -> dict[str, Tensor]:
    """The bound of `mc_m2po` over all draws given: `{"moment_bound": scalar}`."""
    delta = log_ratio(student_logprobs, rollout_logprobs)
    outward = outward_moving(delta, _advantage(student_logprobs, teacher_logprobs), mask.unsqueeze(-1))
    return {"moment_bound": second_moment_bound(delta.detach().square(), outward, budget)}


def _advantage(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    return teacher_logprobs - student_logprobs.detach()


def _mean_over_draws(effective_ratio: Tensor, advantage: Tensor, mask: Tensor) -> PositionLoss:
    loss = -(effective_ratio * advantage).mean(-1)
    return loss, {"mean_teacher_advantage": active_mean(advantage.mean(-1), mask)}


def _draw_fraction(flag: Tensor, mask: Tensor) -> Tensor:
    return active_mean(flag.double().mean(-1), mask)
