"""From whole groups to padded tensors, and to micro-batches of bounded size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.cache import CacheKind, cached_ids, rollout_logprobs
from headway.errors import HeadwayError
from headway.training.entropy import entropy_bounds
from headway.types import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """One batch as tensors, prompt and response in one row, padded on the right to the longest (S).

    Position t of every `[B, S]` tensor speaks of token t of the row; prompt, tool and padding have mask 0.
    """

    input_ids: Tensor
    """`[B, S]` int64."""
    lengths: Tensor
    """`[B]` int64, prompt + response."""
    mask: Tensor
    """`[B, S]` bool, tokens the policy sampled and that train."""
    versions: Tensor
    """`[B, S]` int32, −1 where `mask` is 0."""
    rewards: Tensor
    """`[B]` float32."""
    group: Tensor
    """`[B]` int64, which responses share a prompt: 0 … number of groups − 1."""
    behavior_logprobs: Tensor | None
    """`[B, S]` float32; None when the engine gave none."""
    behavior_entropy: Tensor | None
    """`[B, S]` float32; None when the engine gave none."""
    proximal_logprobs: Tensor | None = None
    """`[B, S]` float32; None when no source scored the batch."""
    cached_ids: Tensor | None = None
    """`[B, S, 1 + K]` int64, the token itself and the ids of a distillation cache; None without one."""
    teacher_logprobs: Tensor | None = None
    """`[B, S, 1 + K]` float32, at `cached_ids`."""
    rollout_logprobs: Tensor | None = None
    """`[B, S, 1 + K]` float32, of the policy that rolled out; None where the cache is no sample of it."""
    routing: Tensor | None = None
    """`[B, S, L, E]` int16, the engine's experts, −1 where none were recorded; None without routing replay."""
    entropy_bound: Tensor | None = None
    """`[B, S]` float32, lower bounds of the behavior entropy; None when the engine reported no most likely tokens."""

    def select(self, rows: Tensor) -> "Rows":
        """These rows, cut to the longest of them."""
        width = int(self.lengths[rows].max())
        return self._map(lambda tensor: tensor[rows, :width] if tensor.ndim > 1 else tensor[rows])

    def idle(self) -> "Rows":
        """The shortest row with no token to predict: a pass over it adds nothing to any gradient."""
        some = self.select(self.lengths.argmin().unsqueeze(0))
        return replace(some, mask=torch.zeros_like(some.mask))

    def to(self, device: torch.device) -> "Rows":
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


class UnlikeOrigins(HeadwayError, ValueError):
    """Log-probs in one batch were not taken as the learner takes its own."""


def check_origins(batch: Batch, *, temperature: float) -> None:
    """Refuse behavior log-probs of another temperature than the learner's, or of unlike engines in one batch.

    Raises UnlikeOrigins naming the group and both origins.
    """
    first = None
    for group in batch.groups:
        for member, response in enumerate(group.responses):
            origin = response.origin
            if origin is None or response.behavior_logprobs is None:
                continue
            if origin.temperature != temperature:
                raise UnlikeOrigins(
                    f"group {group.group_id}, member {member}: log-probs at temperature {origin.temperature}, "
                    f"the learner's are at {temperature}"
                )
            # Two engines of one kind differ in name only.
            taken = (origin.role, origin.dtype, origin.top_p, origin.top_k)
            first = first or taken
            if taken != first:
                raise UnlikeOrigins(f"group {group.group_id}, member {member}: log-probs {taken}, others {first}")


class UnknownToken(HeadwayError, ValueError):
    """A batch holds a token that the model has no embedding of."""


def check_vocabulary(batch: Batch, vocab_size: int) -> None:
    """Refuse token ids outside 0 … vocab_size − 1. Raises UnknownToken naming the group and the token."""
    for group in batch.groups:
        for ids in (group.prompt.token_ids, *(response.token_ids for response in group.responses)):
            unknown = ids[(ids < 0) | (ids >= vocab_size)]
            if unknown.size:
                raise UnknownToken(
                    f"step {batch.step}, group {group.group_id}: token {unknown[0]} lies outside the model's "
                    f"vocabulary of {vocab_size}: the engine serves another model, or the recorded batch is damaged"
                )


def collate(batch: Batch, *, pad_id: int, cache: CacheKind | None = None) -> Rows:
    """Lay a batch out as rows, in the order of `batch.responses`, with their distillation cache if one is named.

    Raises ValueError if some responses carry behavior log-probs, entropy or teacher scores and others do not.
    """
    pairs = [(group.prompt.token_ids, response) for group in batch.groups for response in group.responses]
    starts = [len(prompt) for prompt, _ in pairs]
    lengths = [len(prompt) + len(response.token_ids) for prompt, response in pairs]
    width = max(lengths)
    input_ids = np.full((len(pairs), width), pad_id, np.int64)
    for row, (prompt, response) in zip(input_ids, pairs, strict=True):
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(response.token_ids)] = response.token_ids

    responses = [response for _, response in pairs]

    def spread(name: str, fill: float, dtype: type) -> Tensor | None:
        return _spread([getattr(r, name) for r in responses], name, starts, width, fill, dtype)

    def spread_all(name: str, arrays: list[Any], dtype: type) -> Tensor | None:
        return _spread(arrays, name, starts, width, 0, dtype)

    cached: dict[str, Tensor | None] = {}
    if cache is not None:
        cached = {
            "cached_ids": spread_all("cached ids", [cached_ids(cache, r) for r in responses], np.int64),
            "teacher_logprobs": spread_all("teacher scores", [r.side.teacher_logprobs for r in responses], np.float32),
            "rollout_logprobs": spread_all("draws", [rollout_logprobs(cache, r) for r in responses], np.float32),
        }
    mask = _require(spread("mask", False, np.bool_))
    versions = _require(spread("versions", -1, np.int32))
    return Rows(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.tensor(lengths),
        mask=mask,
        versions=versions.masked_fill(~mask, -1),
        rewards=torch.tensor([r.reward for r in responses], dtype=torch.float32),
        group=torch.tensor([i for i, group in enumerate(batch.groups) for _ in group.responses]),
        behavior_logprobs=spread("behavior_logprobs", 0.0, np.float32),
        behavior_entropy=spread("behavior_entropy", 0.0, np.float32),
        proximal_logprobs=spread("proximal_logprobs", 0.0, np.float32),
        entropy_bound=_spread(entropy_bounds(responses), "side.top_logprobs", starts, width, 0.0, np.float32),
        **cached,
    )


def _spread(
    arrays: Sequence[np.ndarray | None],
    name: str,
    starts: Sequence[int],
    width: int,
    fill: float,
    dtype: type,
) -> Tensor | None:
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) < len(arrays):
        raise ValueError(f"{len(arrays) - len(present)} of {len(arrays)} responses lack {name}; engines must agree")
    out = np.full((len(arrays), width, *present[0].shape[1:]), fill, dtype)
    for row, start, array in zip(out, starts, present, strict=True):
        row[start : start + len(array)] = array
    return torch.from_numpy(out)


def _require(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "mask and versions are never absent"
    return tensor


def micro_batches(lengths: Tensor, *, max_tokens: int) -> list[Tensor]:
    """Split rows into index sets of at most `max_tokens` padded tokens, similar lengths together.

    A row longer than `max_tokens` goes alone. Deterministic: ties keep their order.
    """
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    sizes = lengths.tolist()
    chunks: list[list[int]] = []
    for row in order:
        # The first row of a chunk is its longest, so it sets the padded width.
        if chunks and (len(chunks[-1]) + 1) * sizes[chunks[-1][0]] <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return [torch.tensor(sorted(chunk)) for chunk in chunks]


def shares(lengths: Tensor, *, max_tokens: int, num_ranks: int, keep_split: bool) -> list[list[Tensor]]:
    """The micro-batches of every rank, equally many: empty ones at the end of who has fewer.

    Rows are dealt out by length, so that ranks have about as much to do. `keep_split` deals out the micro-batches of a
    single rank instead, for a loss that looks at each as a whole.
    """
    if keep_split:
        parts = micro_batches(lengths, max_tokens=max_tokens)
        dealt = [parts[rank::num_ranks] for rank in range(num_ranks)]
    else:
        order = torch.argsort(lengths, descending=True, stable=True)
        hands = [order[rank::num_ranks].sort().values for rank in range(num_ranks)]
        dealt = [[hand[part] for part in micro_batches(lengths[hand], max_tokens=max_tokens)] for hand in hands]
    most = max(len(parts) for parts in dealt)
    nothing = torch.zeros(0, dtype=torch.int64)
    return [parts + [nothing] * (most - len(parts)) for parts in dealt]
