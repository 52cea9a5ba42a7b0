"""What an optimizer step minimizes. The learner knows parameters and micro-batches; an objective knows the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.algorithms import (
    EntropySource,
    batch_statistics,
    compute_advantages,
    compute_distillation_loss,
    compute_loss,
    distillation_statistics,
    entropy_error_metrics,
    find_algorithm,
    find_distillation,
    part_statistics,
    policy_diagnostics,
    teacher_diagnostics,
    token_weights,
)
from headway.cache import CacheKind
from headway.training.batching import Rows
from headway.training.groups import require_whole_groups
from headway.types import Batch

Targets = dict[str, Tensor]
"""Constants of a whole batch, `[B]` or `[B, S]`; a micro-batch takes its rows of them."""

Metrics = Mapping[str, Any]

ProximalRule = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(logprobs, behavior_logprobs, versions, policy_version) → proximal log-probs; see `AT_LOSS_TIME`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the policy says of the tokens of some rows; log-probs carry a gradient, the entropy none."""

    logprobs: Tensor
    """`[B, S]`, of the tokens themselves."""
    entropy: Tensor
    """`[B, S]`, of the whole distribution."""
    cached: Tensor | None = None
    """`[B, S, 1 + K]`, at `Rows.cached_ids`; None without a cache."""

    def put(self, rows: Tensor, found: "Scores") -> None:
        """Write these rows' scores, detached, into those of the batch."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(found, name)
            if mine is not None:
                mine[rows, : theirs.shape[1]] = theirs.detach().cpu()


class Objective(Protocol):
    """One loss over a batch of rows, cut into micro-batches in any way without a change of its gradient."""

    @property
    def cache(self) -> CacheKind | None:
        """The distillation cache it reads; None for none."""
        ...

    @property
    def takes_statistics(self) -> bool:
        """Whether the loss of a micro-batch needs `statistics` of the whole batch."""
        ...

    @property
    def sees_micro_batches(self) -> bool:
        """Whether the loss looks at a micro-batch as a whole, so that another split is another loss."""
        ...

    def targets(self, batch: Batch, rows: Rows) -> tuple[Targets, Metrics]:
        """What is fixed once for the whole batch (advantages, token weights), and what there is to report of it."""
        ...

    def live(self, targets: Targets) -> Tensor | None:
        """`[B]` bool, responses that may have a gradient; the others are only scored. None: all, and kept together."""
        ...

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        """What the method takes over the whole batch, without gradient."""
        ...

    def in_parts(self, rows: Rows, scores: Scores, targets: Targets, parts: Sequence[Tensor]) -> Any:
        """Statistics that make `loss` of the whole batch what its `parts` (rows of each micro-batch) came to.

        None where the parts take none of their own.
        """
        ...

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss. `statistics` None: the rows are the whole batch."""
        ...


def part_of(targets: Targets, rows: Tensor, width: int) -> Targets:
    """The rows of a micro-batch `width` tokens wide."""
    return {name: t[rows, :width] if t.ndim > 1 else t[rows] for name, t in targets.items()}


def entropy_used(source: EntropySource, rows: Rows, current: Tensor) -> Tensor | None:
    """What stands for the behavior entropy, `[B, S]`; `current` is that of the policy being trained."""
    match source:
        case "engine":
            return rows.behavior_entropy
        case "topk_lower_bound":
            return rows.entropy_bound
        case "learner":
            return current


class PolicyObjective:
    """A policy loss of `headway.algorithms.ALGORITHMS`; `params` override its defaults. Raises ValueError.

    `behavior_entropy`: where the entropy of the policy that sampled comes from. `proximal`: π_prox at loss time, for
    batches that carry none.
    """

    cache: CacheKind | None = None

    def __init__(
        self,
        algorithm: str,
        params: Mapping[str, Any],
        *,
        behavior_entropy: EntropySource = "engine",
        proximal: ProximalRule | None = None,
    ) -> None:
        method = find_algorithm(algorithm)
        self._algorithm = algorithm
        self._advantage = method.advantage
        self._params = method.resolve(params)
        self._needs_whole_groups = "whole_groups" in method.needs
        self._reads_behavior = "behavior_logprobs" in method.needs
        self._behavior_entropy: EntropySource = behavior_entropy
        self._proximal = proximal
        self.takes_statistics = "whole_batch" in method.needs_for(params)
        self.sees_micro_batches = self._params.get("scope") == "micro_batch"

    def targets(self, batch: Batch, rows: Rows) -> tuple[Targets, Metrics]:
        advantages, metrics = compute_advantages(self._advantage, rewards=rows.rewards, group=rows.group)
        if self._needs_whole_groups:
            require_whole_groups(self._algorithm, batch, rows, advantages)
        weights = token_weights(self._params["reduction"], rows.mask, rows.group, l_max=self._params["l_max"])
        version = torch.full_like(rows.lengths, batch.policy_version)
        return {"advantages": advantages, "weights": weights, "policy_version": version}, metrics

    def live(self, targets: Targets) -> Tensor | None:
        # A response of advantage 0 has no gradient: scoring it alone saves a third of the work. SAT's quantile,
        # though, looks at all tokens of a micro-batch.
        return None if "scope" in self._params else targets["advantages"] != 0

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        with torch.no_grad():
            return batch_statistics(self._algorithm, **self._inputs(rows, scores, targets))

    def in_parts(self, rows: Rows, scores: Scores, targets: Targets, parts: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            return part_statistics(self._algorithm, parts=parts, **self._inputs(rows, scores, targets)) or None

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        if statistics is None and self.takes_statistics:
            statistics = self.statistics(rows, scores, targets)
        loss, metrics = compute_loss(
            self._algorithm,
            group=rows.group,
            weights=targets["weights"],
            statistics=statistics,
            **self._inputs(rows, scores, targets),
        )
        return loss, {**metrics, **self._unread_distance(rows, scores, targets), **self._entropy_error(rows, scores)}

    def _unread_distance(self, rows: Rows, scores: Scores, targets: Targets) -> Metrics:
        """How far the policy is from the one that sampled, where the loss does not read it: the guard has to see it."""
        if self._reads_behavior or rows.behavior_logprobs is None:
            return {}
        advantages = targets["advantages"].unsqueeze(1).expand_as(scores.logprobs)
        return policy_diagnostics(scores.logprobs, rows.behavior_logprobs, advantages, rows.mask)

    def _inputs(self, rows: Rows, scores: Scores, targets: Targets) -> dict[str, Any]:
        return {
            "logprobs": scores.logprobs,
            "behavior_logprobs": rows.behavior_logprobs,
            "behavior_entropy": entropy_used(self._behavior_entropy, rows, scores.entropy),
            "proximal_logprobs": self._proximal_logprobs(rows, scores, targets),
            "advantages": targets["advantages"].unsqueeze(1).expand_as(scores.logprobs),
            "mask": rows.mask,
            **self._params,
        }

    def _proximal_logprobs(self, rows: Rows, scores: Scores, targets: Targets) -> Tensor | None:
        """What the batch carries, or what the run's rule makes of the log-probs at hand; None: `sg(logprobs)`."""
        if rows.proximal_logprobs is not None:
            return rows.proximal_logprobs.to(scores.logprobs.dtype)
        if self._proximal is None or rows.behavior_logprobs is None:
            return None
        behavior = rows.behavior_logprobs.to(scores.logprobs.dtype)
        return self._proximal(scores.logprobs, behavior, rows.versions, int(targets["policy_version"][0]))

    def _entropy_error(self, rows: Rows, scores: Scores) -> Metrics:
        """The error of an approximate behavior entropy, where the engine gives the exact one to hold it against."""
        used = entropy_used(self._behavior_entropy, rows, scores.entropy)
        if self._behavior_entropy == "engine" or used is None or rows.behavior_entropy is None:
            return {}
        return entropy_error_metrics(used.detach(), rows.behavior_entropy, rows.mask)


class DistillationObjective:
    """A loss of `headway.algorithms.DISTILLATIONS`, mean over tokens; `params` override its defaults.

    Column 0 of a cache is the token itself. Losses on draws take it for the draw that it is; losses on a top-k take
    the columns after it, and it serves the diagnostics alone. Raises ValueError.
    """

    def __init__(self, method: str, params: Mapping[str, Any]) -> None:
        found = find_distillation(method)
        self._method, self._params = method, found.resolve(params)
        self.cache: CacheKind | None = found.cache
        self.sees_micro_batches = False
        self._columns = slice(0 if found.cache == "draws" else 1, None)
        self.takes_statistics = found.statistics is not None

    def targets(self, batch: Batch, rows: Rows) -> tuple[Targets, Metrics]:
        return {"distill_weights": token_weights("token_mean", rows.mask)}, {}

    def live(self, targets: Targets) -> Tensor | None:
        return None

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        return distillation_statistics(self._method, **self._inputs(rows, scores))

    def in_parts(self, rows: Rows, scores: Scores, targets: Targets, parts: Sequence[Tensor]) -> Any:
        return None

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        if statistics is None and self.takes_statistics:
            statistics = self.statistics(rows, scores, targets)
        inputs = self._inputs(rows, scores)
        loss, metrics = compute_distillation_loss(
            self._method, **inputs, weights=targets["distill_weights"], statistics=statistics
        )
        draws = slice(None) if self.cache == "draws" else slice(0, 1)
        own = None if rows.behavior_logprobs is None else rows.behavior_logprobs.unsqueeze(-1)
        estimates = teacher_diagnostics(
            _given(scores.cached)[..., draws],
            _given(rows.teacher_logprobs)[..., draws],
            own if rows.rollout_logprobs is None else rows.rollout_logprobs,
            rows.mask,
        )
        return loss, {f"distill_{name}": value for name, value in metrics.items()} | estimates

    def _inputs(self, rows: Rows, scores: Scores) -> dict[str, Any]:
        rollout = rows.rollout_logprobs
        return {
            "student_logprobs": _given(scores.cached)[..., self._columns],
            "teacher_logprobs": _given(rows.teacher_logprobs)[..., self._columns],
            "rollout_logprobs": None if rollout is None else rollout[..., self._columns],
            "mask": rows.mask,
            **self._params,
        }


class WeightedSum:
    """Σ weight · loss of named objectives: reward and teacher in one step. At most one of them reads a cache."""

    def __init__(self, parts: Mapping[str, tuple[float, Objective]]) -> None:
        self._parts = parts
        objectives = [objective for _, objective in parts.values()]
        self.cache: CacheKind | None = next((o.cache for o in objectives if o.cache), None)
        self.takes_statistics = any(o.takes_statistics for o in objectives)
        self.sees_micro_batches = any(o.sees_micro_batches for o in objectives)

    def targets(self, batch: Batch, rows: Rows) -> tuple[Targets, Metrics]:
        targets: Targets = {}
        metrics: dict[str, Any] = {}
        for _, objective in self._parts.values():
            found, told = objective.targets(batch, rows)
            targets |= found
            metrics |= told
        return targets, metrics

    def live(self, targets: Targets) -> Tensor | None:
        parts = [objective.live(targets) for _, objective in self._parts.values()]
        return None if any(part is None for part in parts) else torch.stack([p for p in parts if p is not None]).any(0)

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        return {
            name: objective.statistics(rows, scores, targets)
            for name, (_, objective) in self._parts.items()
            if objective.takes_statistics
        }

    def in_parts(self, rows: Rows, scores: Scores, targets: Targets, parts: Sequence[Tensor]) -> Any:
        return {name: o.in_parts(rows, scores, targets, parts) for name, (_, o) in self._parts.items()}

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        total, metrics = scores.logprobs.new_zeros(()), {}
        for name, (weight, objective) in self._parts.items():
            loss, told = objective.loss(rows, scores, targets, (statistics or {}).get(name))
            total = total + weight * loss
            metrics |= {f"{name}_loss": loss.detach(), **told}
        return total, metrics


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("the batch holds no teacher scores: it was rolled out without a teacher")
    return tensor
