"""The way into every distillation loss, by name: check, compute per position, reduce with global weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headway.algorithms.contract import overlay
from headway.algorithms.diagnostics import Metrics
from headway.algorithms.distillation import (
    PositionLoss,
    forward_kl_teacher_topk,
    mc_clipped,
    mc_decoupled,
    mc_m2po,
    mc_m2po_statistics,
    mc_no_ratio,
    mc_recomputed,
    mc_stale_advantage,
    reverse_kl_student_topk,
)
from headway.algorithms.inputs import as_bool, clean, require, require_live, require_shapes
from headway.algorithms.reduce import token_weights
from headway.errors import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A distillation loss and what it needs. Example: `DISTILLATIONS["mc_recomputed"].needs == {"rollout_logprobs"}`"""

    name: str
    loss: Callable[..., PositionLoss]
    cache: Literal["teacher_topk", "student_topk", "draws"]
    """Which ids are cached: `teacher_topk`, `student_topk`, or `draws` from the student that rolled out."""
    needs: frozenset[str] = frozenset()
    statistics: Callable[..., dict[str, Tensor]] | None = None
    """Taken over the whole optimizer batch; its keys are keywords of `loss`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults with `params` laid over them. Raises ValueError naming the nearest parameter."""
        return overlay(self.name, self.defaults, params)


_ROLLOUT = frozenset({"rollout_logprobs"})

DISTILLATIONS: dict[str, Distillation] = {
    row.name: row
    for row in (
        Distillation(name="forward_kl_teacher_topk", loss=forward_kl_teacher_topk, cache="teacher_topk"),
        Distillation(name="reverse_kl_student_topk", loss=reverse_kl_student_topk, cache="student_topk"),
        Distillation(name="mc_recomputed", loss=mc_recomputed, cache="draws", needs=_ROLLOUT),
        Distillation(name="mc_stale_advantage", loss=mc_stale_advantage, cache="draws", needs=_ROLLOUT),
        Distillation(name="mc_clipped", loss=mc_clipped, cache="draws", needs=_ROLLOUT, defaults={"clip": (0.2, 0.2)}),
        Distillation(name="mc_no_ratio", loss=mc_no_ratio, cache="draws"),
        Distillation(
            name="mc_decoupled",
            loss=mc_decoupled,
            cache="draws",
            needs=_ROLLOUT | {"proximal_logprobs"},
            defaults={"cap": 5.0},
        ),
        Distillation(
            name="mc_m2po",
            loss=mc_m2po,
            cache="draws",
            needs=_ROLLOUT,
            statistics=mc_m2po_statistics,
            defaults={"budget": 0.01},
        ),
    )
}

REFUSED = {
    "topk_kl_advantage": "a KL summed over cached ids is the same for every action at a position, so as an advantage "
    "it has zero expected gradient: choose forward_kl_teacher_topk, reverse_kl_student_topk or mc_recomputed",
}


def find_distillation(name: str) -> Distillation:
    """The distillation loss of that name. Raises ValueError naming the nearest one, or why it is refused."""
    if name in REFUSED:
        raise ValueError(f"{name} is refused: {REFUSED[name]}")
    if name not in DISTILLATIONS:
        raise ValueError(f"unknown distillation {name!r}; {nearest(name, DISTILLATIONS)}")
    return DISTILLATIONS[name]


def compute_distillation_loss(
    name: str,
    *,
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    mask: Tensor,
    weights: Tensor | None = None,
    statistics: Mapping[str, Tensor] | None = None,
    **params: Any,
) -> tuple[Tensor, Metrics]:
    """Σ position_loss · weight of the distillation loss `name` (token mean by default), and its metrics.

    Args:
        student_logprobs: `[B, T, K]`, log pθ at the cached ids, nats; the only tensor that receives a gradient.
        teacher_logprobs: `[B, T, K]`, log q at the same ids.
        rollout_logprobs: `[B, T, K]`, log p_old at the same ids, for the methods that re-weight draws.
        proximal_logprobs: `[B, T, K]`, for `mc_decoupled`; `sg(student_logprobs)` when not given.
        mask: `[B, T]`, true on tokens the student sampled. Masked positions of any tensor may hold NaN.
        weights: `[B, T]`, this micro-batch's rows of the whole batch's `token_weights`; 1/N when not given.
        statistics: whole-batch statistics from `distillation_statistics`, for `mc_m2po` in micro-batches.
        **params: hyper-parameters of the method.

    Returns:
        Scalar loss to minimize and a dict of detached scalars. Gradient at masked positions: 0.

    Raises:
        ValueError: unknown or refused method, unknown parameter, a needed tensor missing, shapes that do not match,
            NaN or infinity at an active position (sample given), a mask that holds weights, a whole-batch statistic
            missing beside `weights`.
    """
    tensors = student_logprobs, teacher_logprobs, rollout_logprobs, proximal_logprobs
    method, settings, cleaned, mask = _prepare(name, *tensors, mask, params)
    if weights is None:
        weights = token_weights("token_mean", mask, dtype=cleaned["student_logprobs"].dtype)
    elif method.statistics is not None and statistics is None:
        raise ValueError(
            f"{name} needs statistics of the whole batch beside weights: call distillation_statistics once on it"
        )
    require_shapes(name, {"weights": weights}, mask.shape)
    position_loss, metrics = method.loss(mask=mask, **cleaned, **settings, **(statistics or {}))
    return torch.where(mask, position_loss * weights, 0.0).sum(), metrics


def distillation_statistics(
    name: str,
    *,
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    mask: Tensor,
    **params: Any,
) -> dict[str, Tensor]:
    """What the method takes over the whole optimizer batch; empty for most. Shapes and refusals as the loss."""
    tensors = student_logprobs, teacher_logprobs, rollout_logprobs, proximal_logprobs
    method, settings, cleaned, mask = _prepare(name, *tensors, mask, params)
    if method.statistics is None:
        return {}
    with torch.no_grad():
        return method.statistics(mask=mask, **cleaned, **settings)


def _prepare(
    name: str,
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    proximal_logprobs: Tensor | None,
    mask: Tensor,
    params: Mapping[str, Any],
) -> tuple[Distillation, dict[str, Any], dict[str, Tensor], Tensor]:
    """The method, its settings, its tensors checked and cleaned, and the mask as bool."""
    method = find_distillation(name)
    settings = method.resolve(params)
    require_live(name, "student_logprobs", student_logprobs, "[B, T, K]")
    if student_logprobs.shape[-1] == 0:
        raise ValueError(f"{name}: student_logprobs has shape {tuple(student_logprobs.shape)}, expected [B, T, K]")
    if proximal_logprobs is None:
        proximal_logprobs = student_logprobs.detach()
    given = {"rollout_logprobs": rollout_logprobs, "proximal_logprobs": proximal_logprobs}
    wanted = {key: tensor for key, tensor in given.items() if key in method.needs}
    tensors = {"student_logprobs": student_logprobs, "teacher_logprobs": teacher_logprobs, **require(name, wanted)}
    require_shapes(name, tensors, student_logprobs.shape)
    require_shapes(name, {"mask": mask}, student_logprobs.shape[:2])
    mask = as_bool(name, mask)
    return method, settings, clean(name, tensors, mask.unsqueeze(-1), live="student_logprobs"), mask
