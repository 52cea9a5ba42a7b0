"""What an optimizer step minimizes. The learner knows parameters and micro-batches; an objective knows the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.algorithms import batch_statistics, compute_advantages, compute_loss, find_algorithm, token_weights
from headway.training.batching import Rows

Targets = dict[str, Tensor]
"""Constants of a whole batch, `[B]` or `[B, S]`; a micro-batch takes its rows of them."""

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the policy says of the tokens of some rows; only `logprobs` carries a gradient."""

    logprobs: Tensor
    """`[B, S]`, of the tokens themselves."""
    entropy: Tensor
    """`[B, S]`, of the whole distribution."""

    def put(self, rows: Tensor, found: "Scores") -> None:
        """Write these rows' scores, detached, into those of the batch."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(found, name)
            mine[rows, : theirs.shape[1]] = theirs.detach().cpu()


class Objective(Protocol):
    """One loss over a batch of rows, cut into micro-batches in any way without a change of its gradient."""

    @property
    def takes_statistics(self) -> bool:
        """Whether the loss of a micro-batch needs `statistics` of the whole batch."""
        ...

    def targets(self, rows: Rows) -> tuple[Targets, Metrics]:
        """What is fixed once for the whole batch (advantages, token weights), and what there is to report of it."""
        ...

    def live(self, targets: Targets) -> Tensor | None:
        """`[B]` bool, responses that may have a gradient; the others are only scored. None: all, and kept together."""
        ...

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        """What the method takes over the whole batch, without gradient."""
        ...

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss. `statistics` None: the rows are the whole batch."""
        ...


def part_of(targets: Targets, rows: Tensor, width: int) -> Targets:
    """The rows of a micro-batch `width` tokens wide."""
    return {name: t[rows, :width] if t.ndim > 1 else t[rows] for name, t in targets.items()}


class PolicyObjective:
    """A policy loss of `headway.algorithms.ALGORITHMS`; `params` override its defaults. Raises ValueError."""

    def __init__(self, algorithm: str, params: Mapping[str, Any]) -> None:
        method = find_algorithm(algorithm)
        self._algorithm = algorithm
        self._advantage = method.advantage
        self._params = method.resolve(params)
        self.takes_statistics = "whole_batch" in method.needs_for(params)

    def targets(self, rows: Rows) -> tuple[Targets, Metrics]:
        advantages, metrics = compute_advantages(self._advantage, rewards=rows.rewards, group=rows.group)
        weights = token_weights(self._params["reduction"], rows.mask, rows.group, l_max=self._params["l_max"])
        return {"advantages": advantages, "weights": weights}, metrics

    def live(self, targets: Targets) -> Tensor | None:
        # A response of advantage 0 has no gradient: scoring it alone saves a third of the work. SAT's quantile,
        # though, looks at all tokens of a micro-batch.
        return None if "scope" in self._params else targets["advantages"] != 0

    def statistics(self, rows: Rows, scores: Scores, targets: Targets) -> Any:
        with torch.no_grad():
            return batch_statistics(self._algorithm, **self._inputs(rows, scores, targets))

    def loss(self, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None) -> tuple[Tensor, Metrics]:
        if statistics is None and self.takes_statistics:
            statistics = self.statistics(rows, scores, targets)
        return compute_loss(
            self._algorithm,
            group=rows.group,
            weights=targets["weights"],
            statistics=statistics,
            **self._inputs(rows, scores, targets),
        )

    def _inputs(self, rows: Rows, scores: Scores, targets: Targets) -> dict[str, Any]:
        return {
            "logprobs": scores.logprobs,
            "behavior_logprobs": rows.behavior_logprobs,
            "behavior_entropy": rows.behavior_entropy,
            "advantages": targets["advantages"].unsqueeze(1).expand_as(scores.logprobs),
            "mask": rows.mask,
            **self._params,
        }
