"""A teacher's arithmetic: waiting requests in, log-probs of the queried ids out, one batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.models.head import gathered_logprobs, top_logprobs
from headway.models.policy import head_weights
from headway.teacher.messages import Score
from headway.teacher.packing import pack
from headway.types import Ints, TeacherScores


@dataclass(frozen=True, slots=True)
class Row:
    """Requests that share their prompt, scored in one row."""

    prompt: Ints
    requests: tuple[int, ...]
    num_tokens: int


class Scorer:
    """Scores requests with one model; no `[tokens, vocabulary]` tensor is ever held.

    `batch_tokens`: most tokens, padding included, in one forward pass; a single longer row goes alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        student_vocab_size: int,
        temperature: float,
        batch_tokens: int,
        autocast: torch.dtype,
    ) -> None:
        self._model = model
        self._weight, self._bias = head_weights(model)
        self._student_vocab_size = student_vocab_size
        self._temperature, self._batch_tokens, self._autocast = temperature, batch_tokens, autocast

    def refusal(self, request: Score) -> str | None:
        """Why a request cannot be served; None when it can."""
        num_scored, vocab_size = len(request.query_ids), len(self._weight)
        longest: int = self._model.config.max_position_embeddings
        if request.query_ids.ndim != 2 or not 0 < num_scored < len(request.token_ids):
            return f"{num_scored} positions to score in {len(request.token_ids)} tokens"
        if len(request.token_ids) > longest:
            return f"{len(request.token_ids)} tokens are more than the teacher's {longest} positions"
        for name, ids in (("token", request.token_ids), ("queried", request.query_ids)):
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                return f"{name} ids {ids.min()}…{ids.max()} leave the teacher's vocabulary of {vocab_size}"
        if not 0 <= request.num_top <= min(vocab_size, self._student_vocab_size):
            return f"num_top = {request.num_top} of a vocabulary of {min(vocab_size, self._student_vocab_size)}"
        return None

    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[TeacherScores]:
        """One answer a request, in order; requests are grouped by prompt and by what they ask for."""
        answers: dict[int, TeacherScores] = {}
        alike: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault((request.query_ids.shape[1], request.num_top), []).append(i)
        for members in alike.values():
            for batch in batches(rows_of(requests, members, self._batch_tokens), self._batch_tokens):
                answers.update(self._score_batch(requests, batch))
        return [answers[i] for i in range(len(requests))]

    def _score_batch(self, requests: Sequence[Score], rows: Sequence[Row]) -> dict[int, TeacherScores]:
        order = [i for row in rows for i in row.requests]
        hidden = self._hidden(requests, rows)
        ids = torch.from_numpy(np.concatenate([requests[i].query_ids for i in order])).to(hidden.device)
        found = [gathered_logprobs(hidden, self._weight, ids, temperature=self._temperature, bias=self._bias)[0]]
        if num_top := requests[order[0]].num_top:
            limit = min(self._student_vocab_size, len(self._weight))
            found += top_logprobs(
                hidden, self._weight, num_top, limit=limit, temperature=self._temperature, bias=self._bias
            )
        ends = np.cumsum([len(requests[i].query_ids) for i in order])[:-1]
        parts = [np.split(tensor.cpu().numpy(), ends) for tensor in found]
        return {i: _answer(*(part[n] for part in parts)) for n, i in enumerate(order)}

    def _hidden(self, requests: Sequence[Score], rows: Sequence[Row]) -> Tensor:
        """`[N, D]`, the states that predict the scored tokens, in the order of the requests in `rows`."""
        device = self._weight.device
        packed = pack([(row.prompt, [requests[i].token_ids[len(row.prompt) :] for i in row.requests]) for row in rows])
        with torch.autocast(device.type, self._autocast, enabled=self._autocast != torch.float32):
            states = self._model.get_decoder()(
                input_ids=packed.input_ids.to(device),
                position_ids=packed.position_ids.to(device),
                attention_mask=packed.attention.to(device),
                use_cache=False,
            ).last_hidden_state
        return states[tuple(packed.predicting.to(device).unbind(1))]


def rows_of(requests: Sequence[Score], members: Sequence[int], most_tokens: int) -> list[Row]:
    """Requests of one prompt together, as many in a row as `most_tokens` hold."""
    by_prompt: dict[bytes, list[int]] = {}
    for i in members:
        request = requests[i]
        by_prompt.setdefault(request.token_ids[: -len(request.query_ids)].tobytes(), []).append(i)
    rows: list[Row] = []
    for same in by_prompt.values():
        prompt = requests[same[0]].token_ids[: -len(requests[same[0]].query_ids)]
        row = Row(prompt, (), len(prompt))
        for i in same:
            added = len(requests[i].query_ids)
            if row.requests and row.num_tokens + added > most_tokens:
                rows.append(row)
                row = Row(prompt, (), len(prompt))
            row = Row(prompt, (*row.requests, i), row.num_tokens + added)
        rows.append(row)
    return rows


def batches(rows: Sequence[Row], most_tokens: int) -> list[list[Row]]:
    """Rows of like width together, at most `most_tokens` with padding; a wider row goes alone."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -row.num_tokens):
        # The first row of a part is its widest, so it sets the padded width.
        if parts and (len(parts[-1]) + 1) * parts[-1][0].num_tokens <= most_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _answer(logprobs: np.ndarray, top_ids: np.ndarray | None = None, top: np.ndarray | None = None) -> TeacherScores:
    return TeacherScores(
        logprobs=logprobs.astype(np.float32),
        top_ids=None if top_ids is None else top_ids.astype(np.int32),
        top_logprobs=None if top is None else top.astype(np.float32),
    )
