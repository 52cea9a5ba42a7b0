"""The SGLang adapter, from SGLang's documentation; not yet run against a real server, only against one made from it.

An update is pause (abort) → load from disk, or take part in a broadcast → continue. Aborting hands back what was
sampled, and the rest is asked for again after the update, so that every answer of the server belongs to the one version
that it names. SGLang draws by (seed, position) under `--enable-deterministic-inference`, which keeps a continued
response its own.

Limits: no entropy and no extra draws; log-probs are those before top-p and top-k, so truncated sampling is refused.
"""

import asyncio
import base64
import binascii
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from headway.engine.http import BadAnswer, TokenId, Version, structured
from headway.engine.remote import RemoteEngine
from headway.engine.request import Request
from headway.engine.sglang_weights import SglangWeights
from headway.engine.weight_files import known, version_folder
from headway.models.routing import NOT_RECORDED
from headway.protocols import RequestRefused
from headway.types import Completion, Experts, FinishReason, SideData, WeightRef
from headway.weights.group import is_meeting, parsed_meeting
from headway.weights.servers import Announced

Scored = tuple[float, TokenId, str | None]
"""log-prob, token id, text."""


class Reason(msgspec.Struct, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str = ""


class Meta(msgspec.Struct, frozen=True):
    """`meta_info` of an answer."""

    finish_reason: Reason
    weight_version: Version
    output_token_logprobs: list[Scored] = []
    output_top_logprobs: list[list[Scored]] = []
    routed_experts: str | None = None
    """Base64 of int32 `[P + T − 1, L, E]`; the last token was never fed back, so nothing routed it."""


class Answer(msgspec.Struct, frozen=True):
    """Of `/generate`."""

    output_ids: list[TokenId]
    meta_info: Meta


class SglangEngine(RemoteEngine):
    """One SGLang server. `place`: a folder of this client's own, which the server can read.

    `num_ranks`: processes that the model is shared out to, each a rank of a broadcast.
    """

    can_route = True
    has_entropy = False

    def __init__(
        self, url: str, *, model: Path, place: Path, num_layers: int, num_ranks: int = 1, **options: Any
    ) -> None:
        super().__init__(url, **options)
        self._weights = SglangWeights(self._http, num_ranks=num_ranks)
        self._sent: tuple[str, list[Announced]] = "", []
        self._model, self._place, self._num_layers = model, place, num_layers
        self._interrupted: set[str] = set()
        self._is_paused = False
        self._changed = asyncio.Condition()
        """Of the two above: a server may stay paused after a broken broadcast, which must not hold up an interrupt."""

    async def _complete(self, id: str, request: Request) -> Completion:
        s = request.sampling
        if s.num_draws or (s.temperature > 0 and (s.top_p < 1 or 0 < s.top_k < self._vocab_size)):
            raise RequestRefused(
                f"request {id!r}: SGLang gives no extra draws, and log-probs only of the whole vocabulary; "
                "set top_p = 1 and top_k = 0, or use another engine"
            )
        parts: list[Completion] = []
        num = 0
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._is_paused or id in self._interrupted)
                if id in self._interrupted:
                    return _joined(parts, "interrupt") if parts else self._nothing(request)
                so_far = np.concatenate([request.token_ids, *(part.token_ids for part in parts)])
                part = await self._ask(id, so_far, request, s.max_tokens - num)
                parts.append(part)
                num += len(part.token_ids)
                if part.finish_reason != "interrupt" or id in self._interrupted:
                    return _joined(parts, part.finish_reason)
                if num == s.max_tokens:  # aborted right after its last token
                    return _joined(parts, "length")
        finally:
            self._interrupted.discard(id)

    async def _ask(self, id: str, token_ids: Any, request: Request, max_tokens: int) -> Completion:
        s = request.sampling
        body = {
            "rid": id,
            "input_ids": token_ids.tolist(),
            "sampling_params": {
                "temperature": s.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": max_tokens,
                "stop_token_ids": list(s.stop_token_ids),
                "ignore_eos": True,
                "sampling_seed": s.seed % 2**31,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": s.num_top,
            "return_routed_experts": s.record_routing,
            "stream": False,
        }
        answer = structured(await self._http.post("/generate", body), Answer)
        return self._completion(answer, len(token_ids), request)

    def _completion(self, answer: Answer, num_prompt: int, request: Request) -> Completion:
        meta, n, s = answer.meta_info, len(answer.output_ids), request.sampling
        tokens = np.array(answer.output_ids, np.int32)
        if [id for _, id, _ in meta.output_token_logprobs] != answer.output_ids:
            raise BadAnswer(f"log-probs of other tokens than the {n} that came back")
        reason: FinishReason = "interrupt" if meta.finish_reason.type == "abort" else meta.finish_reason.type
        return Completion(
            token_ids=tokens,
            versions=np.full(n, int(meta.weight_version), np.int32),
            finish_reason=reason,
            logprobs=np.array([p for p, *_ in meta.output_token_logprobs], np.float32)
            if self._record_logprobs
            else None,
            side=SideData(
                **(_top(meta.output_top_logprobs, n, s.num_top) if s.num_top else {}),
                # Aborted before its first token, it may not have been run at all.
                routing=self._routing(meta, num_prompt + n) if s.record_routing and n else None,
            ),
        )

    def _routing(self, meta: Meta, num_tokens: int) -> Experts:
        try:
            flat = np.frombuffer(base64.b64decode(meta.routed_experts or "", validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise BadAnswer(f"routed experts are no base64 of int32: {error}") from error
        if not flat.size:
            raise BadAnswer(
                "no routed experts came back; the server must be started with --enable-return-routed-experts"
            )
        width, rest = divmod(flat.size, (num_tokens - 1) * self._num_layers)
        if rest:
            raise BadAnswer(f"{flat.size} routed experts do not cover {num_tokens - 1} tokens × {self._num_layers}")
        rows = flat.reshape(num_tokens - 1, self._num_layers, width)
        # The last token was never fed back.
        return np.concatenate([rows, np.full_like(rows[:1], NOT_RECORDED)]).astype(np.int16)

    async def _verify(self, ref: WeightRef) -> None:
        if not is_meeting(ref):
            return await super()._verify(ref)
        meeting = parsed_meeting(ref)
        await self._reach(self._weights.check_size())
        if self._sent[0] != meeting.key:
            self._sent = meeting.key, await self._reach(self._weights.announced(ref, meeting))
        known({tensor.name: tensor.shape for tensor in self._sent[1]}, self._expected)

    async def _swap(self, ref: WeightRef) -> None:
        if is_meeting(ref):
            put = partial(self._weights.receive, ref, parsed_meeting(ref), self._sent[1])
        else:
            folder = await asyncio.to_thread(version_folder, ref, self._model, self._place)
            put = partial(self._weights.load, ref, folder)
        self._is_paused = True
        await self._http.post("/pause_generation", {"mode": "abort"})
        await put()
        await self._http.post("/continue_generation", {})
        async with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    async def _abort(self, ids: list[str]) -> None:
        async with self._changed:
            self._interrupted.update(ids)
            self._changed.notify_all()
        for id in ids:
            await self._http.post("/abort_request", {"rid": id})


def _top(rows: list[list[Scored]], num_tokens: int, width: int) -> dict[str, Any]:
    if len(rows) != num_tokens or any(len(row) < width for row in rows):
        raise BadAnswer(f"top log-probs of {len(rows)} tokens came back, {num_tokens} × {width} were asked for")
    ids = np.array([[id for _, id, _ in row[:width]] for row in rows], np.int32).reshape(num_tokens, width)
    values = np.array([[p for p, *_ in row[:width]] for row in rows], np.float32).reshape(num_tokens, width)
    return {"top_ids": ids, "top_logprobs": values}


def _joined(parts: list[Completion], reason: FinishReason) -> Completion:
    """One completion of several that follow each other; routing is the last that there is: it covers all before."""

    def column(values: list[Any]) -> Any:
        return None if values[0] is None else np.concatenate(values)

    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=reason,
        logprobs=column([part.logprobs for part in parts]),
        side=SideData(
            top_ids=column([part.side.top_ids for part in parts]),
            top_logprobs=column([part.side.top_logprobs for part in parts]),
            routing=next((part.side.routing for part in reversed(parts) if part.side.routing is not None), None),
        ),
    )
