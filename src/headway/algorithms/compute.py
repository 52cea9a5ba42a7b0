"""The way into every policy loss, by name: check, compute per token, reduce with global weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.contract import Algorithm
from headway.algorithms.diagnostics import Metrics, balance, policy_diagnostics, proximal_diagnostics
from headway.algorithms.inputs import as_bool, clean, require, require_live, require_response_advantages, require_shapes
from headway.algorithms.reduce import token_weights
from headway.algorithms.table import find_algorithm

RUN_SETTINGS = ("reduction", "l_max", "scope")
"""Parameters that say how a loss is reduced and over what; the loss itself never sees them."""

TENSORS = ("logprobs", "advantages", "behavior_logprobs", "proximal_logprobs", "behavior_entropy")


def compute_loss(
    name: str,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    behavior_entropy: Tensor | None = None,
    weights: Tensor | None = None,
    statistics: Mapping[str, Tensor] | None = None,
    **params: Any,
) -> tuple[Tensor, Metrics]:
    """Σ token_loss · weight of the algorithm `name`, and its metrics.

    Without `weights` the tensors are taken for the whole optimizer batch. A micro-batch passes its rows of
    `token_weights(reduction, mask, group)` made on the whole batch, and `batch_statistics(…)` where the algorithm
    needs `whole_batch`; its losses then add up to the whole-batch loss.

    Args:
        logprobs: `[B, T]`, log πθ in nats; the only tensor that receives a gradient. Halves are computed in float32.
        advantages: `[B, T]`.
        mask: `[B, T]`, true on tokens the policy sampled. Masked positions of any tensor may hold NaN.
        group: `[B]`, which responses share a prompt; for reduction `group_mean`.
        behavior_logprobs, behavior_entropy: `[B, T]`, nats; tensors an algorithm does not need are not looked at.
        proximal_logprobs: `[B, T]`; `sg(logprobs)` when not given.
        weights: `[B, T]`, this micro-batch's share of the global token weights.
        statistics: whole-batch statistics from `batch_statistics`.
        **params: hyper-parameters of the algorithm, `reduction` and `l_max` among them.

    Returns:
        Scalar loss to minimize and a dict of detached scalars (docs/metrics.md). Gradient at masked positions: 0.

    Raises:
        ValueError: unknown algorithm or parameter (nearest name given), a parameter of the wrong kind or out of
            range, a needed tensor missing, shapes that do not match, log-probs that are no floats, NaN or infinity at
            an active position (sample given), unlike advantages within a response where one is needed, a whole-batch
            statistic missing beside `weights`.
        TypeError: something that is no tensor where one belongs.
    """
    algorithm, settings, arguments, mask = _prepare(
        name, logprobs, advantages, mask, behavior_logprobs, proximal_logprobs, behavior_entropy, params
    )
    if weights is None:
        if group is not None:
            require_shapes(name, {"group": group}, mask.shape[:1])
        weights = token_weights(
            settings["reduction"], mask, group, l_max=settings["l_max"], dtype=arguments["logprobs"].dtype
        )
    elif settings.get("scope") == "batch" and statistics is None:
        raise ValueError(
            f"{name} with scope 'batch' needs statistics of the whole batch beside weights: "
            "call batch_statistics once on the whole batch, or set scope = 'micro_batch'"
        )
    require_shapes(name, {"weights": weights}, mask.shape)
    if "whole_groups" in algorithm.needs:
        # Their monitor is a mean over groups, which only the global weights know.
        arguments["weights"] = weights
    token_loss, metrics = algorithm.loss(mask=mask, **arguments, **_own(settings), **(statistics or {}))
    weighted = token_loss * torch.where(mask, weights, 0.0)
    loss = weighted.sum()
    return loss, metrics | _common_metrics(weighted.detach(), arguments, mask)


def batch_statistics(
    name: str,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    behavior_entropy: Tensor | None = None,
    **params: Any,
) -> dict[str, Tensor]:
    """What the algorithm takes over the whole optimizer batch: pass it to `compute_loss` of every micro-batch.

    Empty for algorithms and parameters that do not need `whole_batch`. Shapes, refusals: as `compute_loss`.
    """
    algorithm, settings, arguments, mask = _prepare(
        name, logprobs, advantages, mask, behavior_logprobs, proximal_logprobs, behavior_entropy, params
    )
    if algorithm.statistics is None or settings["scope"] != "batch":
        return {}
    with torch.no_grad():
        return algorithm.statistics(mask=mask, **arguments, **_own(settings))


def part_statistics(name: str, *, parts: Sequence[Tensor], mask: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """What `scope = "micro_batch"` took in each part: with it `compute_loss` of the whole is the sum over parts.

    Args:
        parts: rows of each micro-batch.
        mask: `[B, T]`.
        **inputs: tensors and parameters as for `batch_statistics`.

    Returns:
        `[B, 1]` each, every row with the number of its part; empty for other scopes, and for a single part.
    """
    settings = find_algorithm(name).resolve({k: v for k, v in inputs.items() if k not in TENSORS})
    if settings.get("scope") != "micro_batch" or len(parts) < 2:
        return {}
    found: dict[str, Tensor] = {}
    for part in parts:
        some: dict[str, Any] = {key: t[part] if isinstance(t, Tensor) else t for key, t in inputs.items()}
        some["scope"] = "batch"
        for key, value in batch_statistics(name, mask=mask[part], **some).items():
            found.setdefault(key, value.new_zeros(len(mask), 1))[part] = value
    return found


def _prepare(
    name: str,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor | None,
    proximal_logprobs: Tensor | None,
    behavior_entropy: Tensor | None,
    params: Mapping[str, Any],
) -> tuple[Algorithm, dict[str, Any], dict[str, Any], Tensor]:
    """The algorithm, its settings, its tensor arguments checked and cleaned, and the mask as bool."""
    algorithm = find_algorithm(name)
    settings = algorithm.resolve(params)
    require_live(name, "logprobs", logprobs, "[B, T]")
    given = {
        "behavior_logprobs": behavior_logprobs,
        "behavior_entropy": behavior_entropy,
        "proximal_logprobs": logprobs.detach() if proximal_logprobs is None else proximal_logprobs,
    }
    needed = require(name, {key: tensor for key, tensor in given.items() if key in algorithm.needs})
    tensors = {"logprobs": logprobs, "advantages": advantages, **needed}
    require_shapes(name, {"mask": mask, **tensors}, logprobs.shape)
    mask = as_bool(name, mask)
    arguments: dict[str, Any] = {"behavior_logprobs": None, **clean(name, tensors, mask, live="logprobs")}
    if "response_advantages" in algorithm.needs:
        require_response_advantages(name, arguments["advantages"], mask)
    return algorithm, settings, arguments, mask


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in RUN_SETTINGS}


def _common_metrics(weighted: Tensor, arguments: Mapping[str, Any], mask: Tensor) -> Metrics:
    """What every algorithm reports: how the loss splits by sign of A, and how far the policy is from the sampler."""
    size = weighted.abs()
    positive = (size * (arguments["advantages"] > 0)).sum()
    negative = (size * (arguments["advantages"] < 0)).sum()
    metrics = {
        "loss_positive": positive,
        "loss_negative": negative,
        "loss_balance": balance(positive, negative),
    }
    if arguments["behavior_logprobs"] is None:
        return metrics
    if "proximal_logprobs" in arguments:
        metrics |= proximal_diagnostics(
            arguments["logprobs"], arguments["behavior_logprobs"], arguments["proximal_logprobs"], mask
        )
    return metrics | policy_diagnostics(
        arguments["logprobs"], arguments["behavior_logprobs"], arguments["advantages"], mask
    )
