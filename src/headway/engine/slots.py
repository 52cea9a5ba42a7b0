"""What the engine remembers of its active requests: numpy arrays with one row a slot.

Rows 0, 1, … num_active − 1 are in use. Every per-token array is indexed by absolute position in prompt + response;
the token at position length − 1 is pending: sampled or given, its key and value not yet cached.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine.request import Request
from headway.engine.sampler import Cut, Knobs, Sampled, stream_of
from headway.types import Completion, Experts, FinishReason, SideData

_TOKEN_FIELDS: dict[str, tuple[type, bool]] = {
    "token_ids": (np.int64, False),
    "versions": (np.int32, False),
    "logprobs": (np.float32, False),
    "entropy": (np.float32, False),
    "kept_mass": (np.float32, False),
    "draw_ids": (np.int32, True),
    "draw_logprobs": (np.float32, True),
    "top_ids": (np.int32, True),
    "top_logprobs": (np.float32, True),
    "routing": (np.int16, True),
}
"""Name of a per-token array: its dtype, and whether it has a third dimension."""


class Slots:
    """State of `max_slots` rows; the third dimension of side data is as wide as its widest request."""

    def __init__(
        self,
        *,
        max_slots: int,
        vocab_size: int,
        logprobs: bool,
        entropy: bool,
        routing_shape: tuple[int, int] = (0, 0),
        num_experts: int = 0,
    ) -> None:
        self._routing_shape, self._expert_dtype = routing_shape, np.int8 if num_experts <= 128 else np.int16
        self._vocab_size, self._logprobs, self._entropy = vocab_size, logprobs, logprobs and entropy
        self.num_active = 0
        self.requests: list[Request | None] = [None] * max_slots
        self.lengths = np.zeros(max_slots, np.int64)
        self.limits = np.zeros(max_slots, np.int64)
        """Length at which a row ends."""
        self._streams = np.zeros(max_slots, np.uint64)
        self._stops = np.full((max_slots, 1), -1, np.int64)
        self._tokens: dict[str, NDArray[Any]] = {}
        self._columns = 0
        self._rows = np.arange(max_slots)

    def place(self, row: int, request: Request) -> None:
        """Put a request into a row."""
        ids, sampling = request.token_ids, request.sampling
        self.requests[row] = request
        self.lengths[row] = len(ids)
        self.limits[row] = len(ids) + sampling.max_tokens
        self._streams[row] = stream_of(sampling.seed)
        num_stops = len(sampling.stop_token_ids)
        if num_stops > self._stops.shape[1]:
            extra = ((0, 0), (0, num_stops - self._stops.shape[1]))
            self._stops = np.pad(self._stops, extra, constant_values=-1)
        self._stops[row] = -1
        self._stops[row, :num_stops] = sampling.stop_token_ids
        self._columns = max(self._columns, int(self.limits[row]))
        self._array("token_ids")[row, : len(ids)] = ids

    def move(self, source: int, target: int) -> None:
        """Put the request of row `source` into row `target`."""
        length = self.lengths[source]
        self.requests[target], self.requests[source] = self.requests[source], None
        for array in (self.lengths, self.limits, self._streams, self._stops):
            array[target] = array[source]
        for array in self._tokens.values():
            array[target, :length] = array[source, :length]

    def tokens(self, row: int) -> NDArray[np.int64]:
        """Prompt and response so far."""
        return self._tokens["token_ids"][row, : self.lengths[row]]

    def pending(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and positions `[n]` of the tokens that come next into the model."""
        positions = self.lengths[: self.num_active] - 1
        return self._tokens["token_ids"][self._rows[: self.num_active], positions], positions

    def randomness(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Streams and positions `[n]` of the tokens about to be sampled."""
        return self._streams[: self.num_active], self.lengths[: self.num_active]

    def knobs(self, device: torch.device) -> Knobs:
        """How the active rows are drawn; worth building once per change of membership."""
        settings = [r.sampling for r in self.requests[: self.num_active] if r is not None]
        temperatures = [s.temperature or 1.0 for s in settings]
        greedy = [s.temperature == 0 for s in settings]
        return Knobs(
            temperature=_tensor(temperatures, device)[:, None] if any(t != 1 for t in temperatures) else None,
            cut=self._cut(device),
            greedy=_tensor(greedy, device) if any(greedy) else None,
            num_draws=max((s.num_draws for s in settings), default=0),
            num_top=max((s.num_top for s in settings), default=0),
            entropy=self._entropy,
        )

    def _cut(self, device: torch.device) -> Cut | None:
        rows = [i for i, r in enumerate(self.requests[: self.num_active]) if r and is_cut(r, self._vocab_size)]
        if not rows:
            return None
        settings = [r.sampling for i in rows if (r := self.requests[i])]
        top_k = [s.top_k or self._vocab_size for s in settings]
        top_p = _tensor([s.top_p for s in settings], device)
        return Cut(_tensor(rows, device), top_p, _tensor(top_k, device), max(top_k))

    def records_routing(self, rows: list[int] | range) -> bool:
        """Whether any of these rows wants the experts of its tokens."""
        return any((r := self.requests[row]) is not None and r.sampling.record_routing for row in rows)

    def set_prompt_routing(self, targets: list[tuple[int, int]], routes: list[Tensor]) -> None:
        """Record the experts of all but the pending token: target (row, j) was prompt j of the U prefilled together.

        routes: for each mixture-of-experts layer `[U · S, E]`.
        """
        experts = _side_by_side(routes).reshape(1 + max(j for _, j in targets), -1, routes[0].shape[1] * len(routes))
        array = self._array("routing", experts.shape[2])
        for row, j in targets:
            length = self.lengths[row] - 1
            array[row, :length] = experts[j, :length]

    def append(self, sampled: Sampled, version: int, routes: list[Tensor] | None = None) -> None:
        """Record one sampled token a row; `routes`: the experts of the tokens that were pending, by layer `[n, E]`."""
        n, rows = self.num_active, self._rows[: self.num_active]
        positions = self.lengths[:n]
        if routes:
            experts = _side_by_side(routes)
            self._array("routing", experts.shape[1])[rows, positions - 1] = experts
        places = rows * self._columns + positions  # in one dimension: a third of the time of two
        for name, tensor in sampled.items():
            if name == "logprobs" and not self._logprobs:
                continue
            value = tensor.cpu().numpy()
            if _TOKEN_FIELDS[name][1]:
                self._array(name, value.shape[1])[rows, positions, : value.shape[1]] = value
            else:
                self._array(name).reshape(-1)[places] = value
        self._array("versions").reshape(-1)[places] = version
        positions += 1  # a view: this lengthens the rows

    def _array(self, name: str, width: int = 0) -> NDArray[Any]:
        """The named per-token array, grown to hold every active limit, and side data `width` wide."""
        dtype, is_wide = _TOKEN_FIELDS[name]
        array = self._tokens.get(name)
        if array is not None and array.shape[1] == self._columns and (not is_wide or array.shape[2] >= width):
            return array
        shape = (len(self.requests), self._columns)
        if is_wide:
            shape = (*shape, max(width, array.shape[2] if array is not None else 0))
        grown = np.zeros(shape, dtype)
        if array is not None:
            grown[tuple(slice(size) for size in array.shape)] = array
        self._tokens[name] = grown
        return grown

    def ended(self) -> list[tuple[int, FinishReason]]:
        """Rows whose last token was a stop token or reached the limit."""
        n = self.num_active
        last, _ = self.pending()
        stopped = (last[:, None] == self._stops[:n]).any(1)
        ended = (stopped | (self.lengths[:n] >= self.limits[:n])).nonzero()[0].tolist()
        return [(row, "stop" if stopped[row] else "length") for row in ended]

    def completion(self, request: Request, row: int | None, reason: FinishReason) -> Completion:
        """What the request has sampled in its row, copied out; nothing yet when it has no row."""
        start = len(request.token_ids)
        stop = int(self.lengths[row]) if row is not None else start

        def take(name: str, width: int | None = None) -> NDArray[Any]:
            dtype = np.int32 if name == "token_ids" else _TOKEN_FIELDS[name][0]
            if start == stop:
                return np.zeros((0,) if width is None else (0, width), dtype)
            part = self._tokens[name][row, start:stop]
            return np.array(part if width is None else part[:, :width], dtype)

        m, k = request.sampling.num_draws, request.sampling.num_top
        return Completion(
            token_ids=take("token_ids"),
            versions=take("versions"),
            finish_reason=reason,
            logprobs=take("logprobs") if self._logprobs else None,
            entropy=take("entropy") if self._entropy else None,
            side=SideData(
                draw_ids=take("draw_ids", m) if m else None,
                draw_logprobs=take("draw_logprobs", m) if m else None,
                top_ids=take("top_ids", k) if k else None,
                top_logprobs=take("top_logprobs", k) if k else None,
                kept_mass=take("kept_mass") if is_cut(request, self._vocab_size) else None,
                routing=self._routing(row, start, stop) if request.sampling.record_routing else None,
            ),
        )

    def _routing(self, row: int | None, start: int, stop: int) -> Experts:
        """`[stop, L, E]`; −1 for the pending token, and for all when none was sampled."""
        routing = np.full((stop, *self._routing_shape), -1, self._expert_dtype)
        if stop > start:
            routing[:-1] = self._tokens["routing"][row, : stop - 1].reshape(-1, *self._routing_shape)
        return routing


def is_cut(request: Request, vocab_size: int) -> bool:
    """Whether top-p or top-k takes anything out of the request's distribution."""
    s = request.sampling
    return s.temperature > 0 and (s.top_p < 1 or 0 < s.top_k < vocab_size)


def _side_by_side(routes: list[Tensor]) -> NDArray[Any]:
    """`[N, L · E]` from the layers' `[N, E]`."""
    return torch.cat(routes, 1).cpu().numpy()


def _tensor(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)
