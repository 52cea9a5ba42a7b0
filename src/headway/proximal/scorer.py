"""Log-probs of given tokens under any parameters of the learner's model, with nothing of the learner disturbed."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.models.policy import response_logprobs
from headway.training.batching import micro_batches
from headway.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence and the positions whose log-prob is asked for.

    Example: `Piece(token_ids=np.array([5, 6, 9], np.int32), wanted=np.array([False, False, True]))`
    """

    token_ids: Ints
    wanted: Bools


class Scorer:
    """Scores pieces with a structural twin of `model`: its own modules, the very same parameter storage.

    Other parameters are swapped into the twin for one call (`torch.func.functional_call`), so neither the learner's
    module, nor its parameters, gradients, optimizer or random stream take part.

    `temperature`: of the rollouts. `micro_batch_tokens`: most padded tokens in one forward pass. `autocast`: what
    forward passes compute in.
    """

    def __init__(
        self, model: torch.nn.Module, *, temperature: float, micro_batch_tokens: int, autocast: torch.dtype
    ) -> None:
        self._twin = _Twin(model, temperature)
        self._device = next(model.parameters()).device
        self._micro_batch_tokens = micro_batch_tokens
        self._autocast = autocast

    @torch.no_grad()
    def score(self, pieces: Sequence[Piece], parameters: Mapping[str, Tensor] | None = None) -> list[Floats]:
        """`[len(piece)]` each, nats, 0 where not wanted; under the model's own parameters when none are given."""
        found: list[Floats] = [np.zeros(0, np.float32)] * len(pieces)
        moved = None if parameters is None else {f"model.{n}": t.to(self._device) for n, t in parameters.items()}
        for part, inputs in self._padded(pieces):
            with torch.autocast(self._device.type, self._autocast, enabled=self._autocast != torch.float32):
                logprobs = self._twin(*inputs) if moved is None else _call(self._twin, moved, inputs)
            for row, index in zip(logprobs.float().cpu().numpy(), part, strict=True):
                found[index] = row[: len(pieces[index].token_ids)].copy()
        return found

    def _padded(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[int], tuple[Tensor, Tensor, Tensor]]]:
        """Indices of a micro-batch, and its (token ids, attention mask, wanted) `[B, S]`."""
        if not pieces:
            return
        lengths = torch.tensor([len(piece.token_ids) for piece in pieces])
        for part in micro_batches(lengths, max_tokens=self._micro_batch_tokens):
            indices, width = part.tolist(), int(lengths[part].max())
            ids = np.zeros((len(indices), width), np.int64)
            wanted = np.zeros((len(indices), width), np.bool_)
            for row, index in enumerate(indices):
                end = len(pieces[index].token_ids)
                ids[row, :end], wanted[row, :end] = pieces[index].token_ids, pieces[index].wanted
            attention = torch.arange(width) < lengths[part].unsqueeze(1)
            inputs = (torch.from_numpy(ids), attention, torch.from_numpy(wanted))
            yield indices, tuple(tensor.to(self._device) for tensor in inputs)  # pyright: ignore[reportReturnType]


class _Twin(torch.nn.Module):
    """Copies modules and shares tensors: a change of the learner's parameters shows here, a swap here not there."""

    def __init__(self, model: torch.nn.Module, temperature: float) -> None:
        super().__init__()
        shared: dict[int, Any] = {id(t): t for t in chain(model.parameters(), model.buffers())}
        self.model = copy.deepcopy(model, shared).eval()
        self._temperature = temperature

    def forward(self, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor) -> Tensor:
        model: Any = self.model
        return response_logprobs(model, input_ids, attention_mask, wanted, temperature=self._temperature)[0]


def _call(twin: _Twin, parameters: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    return torch.func.functional_call(twin, parameters, inputs)
