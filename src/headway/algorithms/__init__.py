"""Every method as one pure function of tensors, and one table that names them."""

from headway.algorithms.advantages import (
    ADVANTAGES,
    centered_advantages,
    compute_advantages,
    grpo_advantages,
    rloo_advantages,
    uncentered_groups,
)
from headway.algorithms.compute import batch_statistics, compute_loss, part_statistics
from headway.algorithms.contract import Algorithm
from headway.algorithms.diagnostics import QUADRANTS, policy_diagnostics, teacher_diagnostics
from headway.algorithms.distill import (
    DISTILLATIONS,
    Distillation,
    compute_distillation_loss,
    distillation_statistics,
    find_distillation,
)
from headway.algorithms.entropy import EntropySource, entropy_error_metrics, topk_entropy_lower_bound
from headway.algorithms.learning_rate import response_log_ratios, vcpo_lr_scale
from headway.algorithms.noise import NoiseFloor, noise_floor
from headway.algorithms.proximal import (
    EwmaStep,
    ewma_beta,
    ewma_restarts,
    ewma_step,
    loglinear_bounds,
    loglinear_proximal,
)
from headway.algorithms.reduce import REDUCTIONS, response_weights, token_weights
from headway.algorithms.table import ALGORITHMS, find_algorithm

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "DISTILLATIONS",
    "QUADRANTS",
    "REDUCTIONS",
    "Algorithm",
    "Distillation",
    "EntropySource",
    "EwmaStep",
    "NoiseFloor",
    "batch_statistics",
    "centered_advantages",
    "compute_advantages",
    "compute_distillation_loss",
    "compute_loss",
    "distillation_statistics",
    "entropy_error_metrics",
    "ewma_beta",
    "ewma_restarts",
    "ewma_step",
    "find_algorithm",
    "find_distillation",
    "grpo_advantages",
    "loglinear_bounds",
    "loglinear_proximal",
    "noise_floor",
    "part_statistics",
    "policy_diagnostics",
    "response_log_ratios",
    "response_weights",
    "rloo_advantages",
    "teacher_diagnostics",
    "token_weights",
    "topk_entropy_lower_bound",
    "uncentered_groups",
    "vcpo_lr_scale",
]
