"""The built-in engine: continuous batching on one device, in one thread, with weights swapped between steps.

`step` is refill → decode → sample → record → hand back what ended. A prompt is prefilled up to its last token; that one
is pending like any sampled token, so every logit comes out of the same decode pass. Nothing cached outlives its
request: a prompt admitted after an update never meets keys and values of an earlier version.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine.architecture import Architecture
from headway.engine.busy import BusyTime
from headway.engine.decoder import Decoder, Parameters
from headway.engine.request import Request, make_request
from headway.engine.sampler import Knobs, sample, uniforms
from headway.engine.slots import Slots
from headway.protocols import NotFinite
from headway.types import NO_VERSION, Completion, EngineStatus, Ints, Sampling

STEPS_AHEAD = 8

Finished = list[tuple[Any, Completion]]
OnUpdate = Literal["keep", "recompute"]


class TorchEngine:
    """Samples from a Llama/Qwen-style model; synchronous, the caller drives `step`.

    `on_update`: after `load`, the sequences in flight `keep` their cached keys and values of earlier versions, or
    `recompute` them all under the new weights.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_slots: int,
        max_length: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        on_update: OnUpdate = "keep",
        record_logprobs: bool = True,
        record_entropy: bool = True,
        prefill_tokens: int = 8192,
    ) -> None:
        if on_update not in ("keep", "recompute"):
            raise ValueError(f"on_update must be 'keep' or 'recompute', got {on_update!r}")
        if max_slots < 1 or max_length < 2:
            raise ValueError(f"needs max_slots ≥ 1 and max_length ≥ 2, got {max_slots} and {max_length}")
        self._arch = Architecture(config)
        self._device = torch.device(device)
        self.max_length, self.max_slots = max_length, max_slots
        self._decoder = Decoder(self._arch, max_length=max_length, device=self._device, dtype=dtype)
        self._cache = self._decoder.make_cache(max_rows=max_slots, max_columns=max_length)
        self._slots = Slots(
            max_slots=max_slots,
            vocab_size=self._arch.vocab_size,
            logprobs=record_logprobs,
            entropy=record_entropy,
            routing_shape=(self._arch.num_sparse_layers, self._arch.num_experts_per_token),
            num_experts=self._arch.num_experts,
        )
        self._waiting: deque[Request] = deque()
        self._unfinished: set[Any] = set()
        self._holes: list[int] = []
        """Rows below num_active whose request is gone: refilled first, else closed by moving the last row."""
        self._knobs: Knobs | None = None
        """How the active rows are drawn, and what follows, hold until the next change of membership."""
        self._records_routing = False
        self._ahead: list[NDArray[np.float64]] = []
        """Randomness of the next steps, the nearest last."""
        self._params: Parameters | None = None
        self._on_update, self._prefill_tokens = on_update, prefill_tokens
        self.version = NO_VERSION
        self._num_tokens, self._num_steps, self._busy, self._started = 0, 0, BusyTime(), time.monotonic()
        self._num_plain_steps, self._num_plain_tokens, self._plain_s = 0, 0, 0.0

    @property
    def status(self) -> EngineStatus:
        """The engine's own account of itself."""
        return EngineStatus(
            version=self.version,
            num_active=self._slots.num_active - len(self._holes),
            num_waiting=len(self._waiting),
            num_tokens=self._num_tokens,
            busy_s=self._busy.seconds,
            up_s=time.monotonic() - self._started,
            num_steps=self._num_steps,
            num_plain_steps=self._num_plain_steps,
            num_plain_tokens=self._num_plain_tokens,
            plain_s=self._plain_s,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._unfinished)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Use these weights for every later token. The tensors are read where they lie: keep them alive and unchanged.

        Raises WeightsRefused naming the tensor when one is missing, unknown, misshapen or not finite; the previous
        version then stays in use.
        """
        self._arch.check(tensors)
        self._params, self.version = self._decoder.bind(tensors), version
        if self._on_update == "recompute":
            self._close_holes()
            # The experts of these tokens are on record from the pass that went before what was drawn.
            self._prefill(list(range(self._slots.num_active)), record=False)

    def submit(self, request_id: Any, token_ids: Ints | Sequence[int], sampling: Sampling) -> None:
        """Queue a request. Raises ValueError naming the request and the limit that it breaks."""
        if self._params is None:
            raise ValueError(f"request {request_id!r}: the engine has no weights yet; load a version first")
        if request_id in self._unfinished:
            raise ValueError(f"request {request_id!r}: an unfinished request has the same id")
        request = make_request(
            request_id,
            token_ids,
            sampling,
            vocab_size=self._arch.vocab_size,
            max_length=self.max_length,
            is_sparse=self._arch.num_sparse_layers > 0,
        )
        if not self._unfinished:
            self._busy.note(has_work=True)
        self._unfinished.add(request_id)
        if self._waiting and sampling.priority < self._waiting[-1].sampling.priority:
            insort(self._waiting, request, key=lambda waiting: waiting.sampling.priority)
        else:
            self._waiting.append(request)

    def cancel(self, request_id: Any) -> None:
        """Forget a request; one that is already finished or unknown is no error."""
        if request_id not in self._unfinished:
            return
        self._end(request_id)
        for row in range(self._slots.num_active):
            request = self._slots.requests[row]
            if request is not None and request.id == request_id:
                self._vacate(row)
                return
        self._waiting = deque(r for r in self._waiting if r.id != request_id)

    def interrupt(self) -> Finished:
        """Every unfinished request with what it has so far; asking again with those tokens continues it."""
        partial: Finished = []
        for row in range(self._slots.num_active):
            request = self._slots.requests[row]
            if request is not None:
                partial.append((request.id, self._slots.completion(request, row, "interrupt")))
        partial += [(r.id, self._slots.completion(r, None, "interrupt")) for r in self._waiting]
        self.clear()
        return partial

    def clear(self) -> list[Any]:
        """Drop every unfinished request; returns their ids."""
        ids = list(self._unfinished)
        for row in range(self._slots.num_active):
            self._slots.requests[row] = None
        self._slots.num_active = 0
        self._holes, self._knobs = [], None
        self._waiting.clear()
        self._unfinished.clear()
        self._busy.note(has_work=False)
        return ids

    @torch.inference_mode()
    def step(self) -> Finished:
        """Refill free slots, sample one token for every active request, return those that ended.

        Raises NotFinite when the model's output is not; `clear` is then the way on.
        """
        begun = time.perf_counter()
        joined, num_active = self._refill(), self._slots.num_active
        if not num_active:
            return []
        self._decode()
        finished: Finished = []
        for row, reason in self._slots.ended():
            request = self._slots.requests[row]
            assert request is not None
            finished.append((request.id, self._slots.completion(request, row, reason)))
            self._end(request.id)
            self._vacate(row)
        if not joined:
            self._num_plain_steps += 1
            self._num_plain_tokens += num_active
            self._plain_s += time.perf_counter() - begun
        return finished

    def generate(
        self, prompts: Iterable[Ints | Sequence[int]], sampling: Sampling, n: int = 1
    ) -> list[list[Completion]]:
        """n completions for each prompt, offline; sample j of prompt i has the seed `sampling.seed + i·n + j`."""
        if self.has_work:
            raise ValueError("generate needs an idle engine: requests are unfinished")
        prompts = list(prompts)
        for i, prompt in enumerate(prompts):
            for j in range(n):
                try:
                    self.submit((i, j), prompt, replace(sampling, seed=sampling.seed + i * n + j))
                except ValueError:
                    self.clear()
                    raise
        done: dict[Any, Completion] = {}
        while self.has_work:
            done.update(self.step())
        return [[done[i, j] for j in range(n)] for i in range(len(prompts))]

    def _end(self, request_id: Any) -> None:
        self._unfinished.discard(request_id)
        if not self._unfinished:
            self._busy.note(has_work=False)

    def _vacate(self, row: int) -> None:
        self._slots.requests[row] = None
        self._holes.append(row)
        self._knobs = None

    def _refill(self) -> bool:
        """Waiting requests into holes first, then into fresh rows; what holes remain are closed. Whether any joined."""
        rows: list[int] = []
        # Lowest hole first: those that remain lie above every refilled row, so closing them moves none of these.
        self._holes.sort(reverse=True)
        while self._waiting and (self._holes or self._slots.num_active < self.max_slots):
            row = self._holes.pop() if self._holes else self._slots.num_active
            self._slots.num_active = max(self._slots.num_active, row + 1)
            self._slots.place(row, self._waiting.popleft())
            rows.append(row)
        self._close_holes()
        if rows:
            self._knobs = None
            self._prefill(rows)
        return bool(rows)

    def _close_holes(self) -> None:
        for hole in sorted(self._holes, reverse=True):  # highest first: what is moved is never itself a hole
            last = self._slots.num_active - 1
            if hole != last:
                self._cache.move(last, hole, int(self._slots.lengths[last]) - 1)
                self._slots.move(last, hole)
            self._slots.num_active = last
        self._holes = []

    def _prefill(self, rows: list[int], *, record: bool = True) -> None:
        """Cache all but the pending token of these rows: equal prompts once, short ones together, long ones apart."""
        same: dict[bytes, list[int]] = {}
        for row in rows:
            same.setdefault(self._slots.tokens(row)[:-1].tobytes(), []).append(row)
        prompts = [np.frombuffer(key, np.int64) for key in same]
        groups = list(same.values())
        order = sorted((i for i, p in enumerate(prompts) if p.size), key=lambda i: prompts[i].size)
        while order:
            longest = prompts[order[-1]].size
            count = max(1, self._prefill_tokens // longest)
            chunk, order = order[-count:], order[:-count]
            self._cache.reserve(self._slots.num_active, longest)
            ids = np.zeros((len(chunk), longest), np.int64)
            for j, i in enumerate(chunk):
                ids[j, : prompts[i].size] = prompts[i]
            targets = [(row, j) for j, i in enumerate(chunk) for row in groups[i]]
            where = self._to_device(np.array(targets, np.int64))
            routes = [] if record and self._slots.records_routing([row for row, _ in targets]) else None
            assert self._params is not None
            self._decoder.prefill(self._params, self._cache, self._to_device(ids), where[:, 0], where[:, 1], routes)
            if routes:
                self._slots.set_prompt_routing(targets, routes)

    def _decode(self) -> None:
        assert self._params is not None
        slots = self._slots
        ids, positions = slots.pending()
        longest = int(positions.max()) + 1
        self._cache.reserve(slots.num_active, longest)
        if self._knobs is None:
            self._knobs, self._ahead = slots.knobs(self._device), []
            self._records_routing = slots.records_routing(range(slots.num_active))
        if not self._ahead:
            self._ahead = self._draw_ahead(self._knobs.num_draws)
        routes = [] if self._records_routing else None
        logits = self._decoder.decode(
            self._params, self._cache, self._to_device(ids), self._to_device(positions), longest, routes
        )
        sampled = sample(logits, self._knobs, self._to_device(self._ahead.pop()))
        finite = np.isfinite(sampled.logprobs.cpu().numpy())
        if not finite.all():
            self._refuse_not_finite(int(finite.argmin()))
        slots.append(sampled, self.version, routes)
        self._num_tokens += slots.num_active
        self._num_steps += 1

    def _draw_ahead(self, num_draws: int) -> list[NDArray[np.float64]]:
        """`[n, 1 + num_draws]` of the next steps, the nearest last: at few rows, hashing all costs what one does."""
        streams, positions = self._slots.randomness()
        steps = np.arange(STEPS_AHEAD)[::-1, None]
        u = uniforms(np.tile(streams, STEPS_AHEAD), (positions + steps).ravel(), num_draws)
        return list(u.reshape(STEPS_AHEAD, len(streams), -1))

    def _refuse_not_finite(self, row: int) -> None:
        request = self._slots.requests[row]
        self._cache.clear()
        raise NotFinite(
            f"request {request.id if request else row!r}: the model's output at position "
            f"{self._slots.lengths[row]} is not finite under weights version {self.version}"
        )

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)
