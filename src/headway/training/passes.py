"""The passes of one optimizer step over a batch: which micro-batches a rank runs, and what they come to together."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.models.routing import Replay
from headway.models.tiles import Tiles
from headway.training.batching import Rows, shares
from headway.training.finite import in_part
from headway.training.objectives import Objective, Scores, Targets, part_of
from headway.training.ranks import Ranks
from headway.training.routing import agreement, replaying
from headway.training.scoring import score_rows


class Passes:
    """Forward and backward passes over the rows of a batch, this rank's share of them.

    All ranks lay out the same rows and run equally many passes. Arguments as of `TorchLearner`.
    """

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        objective: Objective,
        *,
        temperature: float,
        micro_batch_tokens: int,
        autocast: torch.dtype,
        tiles: Tiles,
    ) -> None:
        self._model, self._ranks, self._objective = model, ranks, objective
        self._temperature, self._micro_batch_tokens = temperature, micro_batch_tokens
        self._autocast, self._tiles = autocast, tiles

    def backward(self, rows: Rows, targets: Targets) -> tuple[Scores, dict[str, float]]:
        """Accumulate the gradient of the whole batch; return its detached scores, and how far routing agreed."""
        self._ranks.zero_gradient()
        statistics = self._statistics(rows, targets)
        scores = self._blank(rows)
        replays: list[Replay] = []
        for part, live in self._with_and_without_gradient(rows, targets):
            some = rows.select(part) if len(part) else rows.idle()
            # Around the backward pass too: gradient checkpointing runs the layers again there.
            with replaying(self._model, some) as replay:
                with torch.set_grad_enabled(live):
                    found = self._forward(some)
                if live and len(part):
                    share = part_of(targets, part, some.input_ids.shape[1])
                    with in_part(part):
                        loss, _ = loss_of(self._objective, some, found, share, statistics)
                    loss.backward()
                elif live:
                    found.logprobs.sum().backward()
            if len(part):
                scores.put(part, found)
                replays += [replay] if replay is not None else []
        routed = {} if rows.routing is None else agreement(replays, self._ranks.sum)
        return self._together(scores), routed

    def _with_and_without_gradient(self, rows: Rows, targets: Targets) -> Iterator[tuple[Tensor, bool]]:
        """This rank's micro-batches, and whether they need a backward pass."""
        may_learn = self._objective.live(targets)
        if may_learn is None:
            yield from ((part, True) for part in self._micro_batches(rows.lengths))
            return
        for live in (True, False):
            chosen = torch.nonzero(may_learn == live).flatten()
            if len(chosen):
                yield from ((chosen[part], live) for part in self._micro_batches(rows.lengths[chosen]))

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        """This rank's, as many as every rank's: an empty one is a pass that only keeps step with the others."""
        return self._shares(lengths)[self._ranks.rank]

    def all_micro_batches(self, rows: Rows) -> list[Tensor]:
        return [part for parts in self._shares(rows.lengths) for part in parts if len(part)]

    def _shares(self, lengths: Tensor) -> list[list[Tensor]]:
        return shares(
            lengths,
            max_tokens=self._micro_batch_tokens,
            num_ranks=self._ranks.num_ranks,
            keep_split=self._objective.sees_micro_batches,
        )

    def _statistics(self, rows: Rows, targets: Targets) -> Any:
        """Statistics of the whole batch, from a first pass without gradient; None if nobody needs them."""
        here = self._ranks.num_ranks == 1 and len(self._micro_batches(rows.lengths)) == 1
        if not self._objective.takes_statistics or here:
            return None
        return self._objective.statistics(rows, self.score(rows), targets)

    def score(self, rows: Rows) -> Scores:
        """Scores of all rows, without gradient."""
        scores = self._blank(rows)
        with torch.no_grad():
            for part in self._micro_batches(rows.lengths):
                some = rows.select(part) if len(part) else rows.idle()
                with replaying(self._model, some):
                    found = self._forward(some)
                if len(part):
                    scores.put(part, found)
        return self._together(scores)

    def _together(self, scores: Scores) -> Scores:
        """Every row's scores, on every rank: one rank has them, all others have 0."""
        for tensor in (scores.logprobs, scores.entropy, scores.cached):
            if tensor is not None:
                self._ranks.sum(tensor)
        return scores

    def _blank(self, rows: Rows) -> Scores:
        """Zeros in the precision of the master weights: rounding would move tokens across thresholds."""
        blank = partial(torch.zeros, dtype=next(iter(self._ranks.parameters.values())).dtype)
        shape = rows.input_ids.shape
        cached = None if rows.cached_ids is None else blank(rows.cached_ids.shape)
        return Scores(blank(shape), blank(shape), cached)

    def _forward(self, rows: Rows) -> Scores:
        settings: dict[str, Any] = {"autocast": self._autocast, "tiles": self._tiles}
        score = partial(score_rows, rows=rows, temperature=self._temperature, **settings)
        logprobs, entropy = self._ranks.run(score)
        return Scores(logprobs, entropy) if rows.cached_ids is None else Scores(logprobs[..., 0], entropy, logprobs)


def loss_of(
    objective: Objective, rows: Rows, scores: Scores, targets: Targets, statistics: Any = None
) -> tuple[Tensor, Mapping[str, Any]]:
    """Loss and metrics of these rows, where their scores are."""
    device = scores.logprobs.device
    here = {name: tensor.to(device) for name, tensor in targets.items()}
    return objective.loss(rows.to(device), scores, here, statistics)
