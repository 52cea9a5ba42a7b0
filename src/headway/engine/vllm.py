"""The vLLM adapter: token-in, token-out over `/inference/v1/generate`, with versions that vLLM stamps itself.

Every decode step of vLLM carries the weight version it ran under, which changes only while the scheduler is paused: the
version of each token is exact. Tokens are drawn by `headway.engine.vllm_plugin` inside the server, which keeps
log-probs, entropy and side data until the client takes them, checked against the tokens vLLM returned.

An update is pause (keep) → load → label → resume. Cached prefixes are salted with the version and with this client's
own name: a server that another run left has blocks of its weights, under versions of the same numbers.
"""

import asyncio
import base64
import json
from typing import Any, Literal

import msgspec
import numpy as np

from headway.engine.http import BadAnswer, HttpError, TokenId, Version, structured
from headway.engine.remote import RemoteEngine
from headway.engine.request import Request
from headway.errors import HeadwayError
from headway.protocols import NotFinite
from headway.types import Completion, FinishReason, Floats, Ints, SideData, WeightRef
from headway.wire import decode

EXTRA_ARGS_KEY = "headway"
"""What the plugin looks for in a request."""

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "interrupt"}


class Span(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` of one version."""

    version: Version
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    token_ids: list[TokenId]
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct, frozen=True):
    """Of `/inference/v1/generate`."""

    choices: list[Choice]


class Results(msgspec.Struct, frozen=True):
    """Of `/collective_rpc`: one entry a worker."""

    results: list[Any]


class Record(msgspec.Struct, frozen=True):
    """Of one request, by the plugin: the fields of `headway.engine.sampler.Sampled`, one row a token."""

    token_ids: Ints = np.zeros(0, np.int32)
    logprobs: Floats = np.zeros(0, np.float32)
    entropy: Floats = np.zeros(0, np.float32)
    kept_mass: Floats | None = None
    draw_ids: Ints | None = None
    draw_logprobs: Floats | None = None
    top_ids: Ints | None = None
    top_logprobs: Floats | None = None


class Hello(msgspec.Struct, frozen=True):
    """Facts about a server."""

    tied: bool
    vocab_size: int
    max_length: int
    dtype: str


class ServerRefused(HeadwayError, RuntimeError):
    """A server that this adapter cannot work with; the message says how to start one that it can."""


class VllmEngine(RemoteEngine):
    """One vLLM server."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._wanted: dict[str, asyncio.Future[Record]] = {}
        self._forgotten: list[str] = []
        self._taking: asyncio.Task[None] | None = None

    async def hello(self) -> Hello:
        """Ask the plugin for facts. Raises ServerRefused when the server has none or cannot serve as it stands."""
        try:
            hello = structured(await self._worker_call("headway_hello"), Hello)
        except (HttpError, BadAnswer) as error:
            raise ServerRefused(
                f"the server at {self.endpoint} lacks Headway's plugin, refuses the key, or is closed to control "
                f"({error}); start it with the command that `python -m headway.engine.vllm_server MODEL FOLDER` prints"
            ) from error
        if hello.tied:
            raise ServerRefused(
                f"the server at {self.endpoint} serves tied embeddings, whose head an update may not reach; serve the "
                "folder that `python -m headway.engine.vllm_server MODEL FOLDER` writes"
            )
        if hello.vocab_size != self._vocab_size or hello.max_length < self._max_length:
            raise ServerRefused(
                f"the server at {self.endpoint} has a vocabulary of {hello.vocab_size} and --max-model-len "
                f"{hello.max_length}; the run needs {self._vocab_size} and at least {self._max_length}"
            )
        return hello

    async def _complete(self, id: str, request: Request) -> Completion:
        s = request.sampling
        asked = {"id": id, "seed": s.seed & (2**64 - 1), "temperature": s.temperature, "top_p": s.top_p}
        asked |= {"top_k": s.top_k, "num_draws": s.num_draws, "num_top": s.num_top}
        body = {
            "request_id": id,
            "token_ids": request.token_ids.tolist(),
            "cache_salt": f"{self._prefix} version {self.version}",
            "sampling_params": {
                # The plugin leaves one token to choose from; greedy is the cheapest way to choose it.
                "temperature": 0.0,
                "max_tokens": s.max_tokens,
                "stop_token_ids": list(s.stop_token_ids),
                "ignore_eos": True,
                "detokenize": False,
                "extra_args": {EXTRA_ARGS_KEY: asked},
            },
        }
        try:
            answer = structured(await self._http.post("/inference/v1/generate", body), Answer)
            if len(answer.choices) != 1:
                raise BadAnswer(f"{len(answer.choices)} choices came back, one was asked for")
            return self._completion(answer.choices[0], await self._take(id), request)
        except asyncio.CancelledError:
            self._forgotten.append(id)
            raise

    def _completion(self, choice: Choice, record: Record, request: Request) -> Completion:
        tokens, s = np.array(choice.token_ids, np.int32), request.sampling
        n = len(tokens)  # an aborted request may have sampled more than it returned
        if not np.array_equal(_column(record.token_ids, n), tokens):
            raise BadAnswer(f"vLLM returned tokens {tokens}, its sampler drew {record.token_ids}")
        logprobs, entropy = _column(record.logprobs, n), _column(record.entropy, n)
        if not np.isfinite(logprobs).all():
            raise NotFinite(f"the model's output is not finite under weights version {self.version}")
        is_cut = s.temperature > 0 and (s.top_p < 1 or 0 < s.top_k < self._vocab_size)
        m, k = s.num_draws, s.num_top
        side = {"draw_ids": m, "draw_logprobs": m, "top_ids": k, "top_logprobs": k}
        columns = {name: _columns(getattr(record, name), n, width) for name, width in side.items() if width}
        return Completion(
            token_ids=tokens,
            versions=_versions(choice.weight_versions or [], n),
            finish_reason=_REASONS[choice.finish_reason],
            logprobs=logprobs if self._record_logprobs else None,
            entropy=entropy if self._record_logprobs else None,
            side=SideData(**columns, kept_mass=_column(record.kept_mass, n) if is_cut else None),
        )

    async def _swap(self, ref: WeightRef) -> None:
        clear = str(self._on_update == "recompute").lower()
        await self._http.post(f"/pause?mode=keep&clear_cache={clear}")
        await self._worker_call("headway_load", ref.path)
        await self._http.post("/update_weight_version", {"new_version": str(ref.version)})
        await self._http.post("/resume")

    async def _abort(self, ids: list[str]) -> None:
        await self._http.post("/abort_requests", {"request_ids": [f"generate-tokens-{id}" for id in ids]})

    async def _worker_call(self, method: str, *args: str) -> Any:
        """What the plugin answers in the first worker; all workers sample the same, and all load."""
        answer = await self._http.post("/collective_rpc", {"method": method, "args": list(args)})
        results = structured(answer, Results).results
        if not results:
            raise BadAnswer(f"{method}: no worker answered")
        return results[0]

    async def _take(self, id: str) -> Record:
        """Fetch one record; those wanted meanwhile travel together."""
        self._wanted[id] = asyncio.get_running_loop().create_future()
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take_all())
        try:
            return await self._wanted[id]
        finally:
            self._wanted.pop(id, None)

    async def _take_all(self) -> None:
        while wanted := {id: future for id, future in self._wanted.items() if not future.done()}:
            forgotten, self._forgotten = self._forgotten, []
            try:
                text = await self._worker_call("headway_take", json.dumps([*wanted, *forgotten]))
                records = _records(text, list(wanted))
                for id, future in wanted.items():
                    if not future.done():
                        future.set_result(records[id])
            except Exception as error:  # whoever waits for the record is told, and says what it means
                for future in wanted.values():
                    if not future.done():
                        future.set_exception(error)


def _records(text: Any, ids: list[str]) -> dict[str, Record]:
    """What the plugin kept of these requests, out of base64 of msgpack. Raises BadAnswer."""
    try:
        records = decode(base64.b64decode(text, validate=True), dict[str, Record])
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadAnswer(f"headway_take: {type(error).__name__}: {error}") from error
    if missing := [id for id in ids if id not in records]:
        raise BadAnswer(f"headway_take: no record of {missing[0]}")
    return records


def _versions(spans: list[Span], num_tokens: int) -> Ints:
    versions, end = np.zeros(num_tokens, np.int32), 0
    for span in spans:
        if span.start != end or not span.start <= span.end <= num_tokens:
            raise BadAnswer(f"weight versions {spans} do not cover the {num_tokens} tokens in order")
        versions[span.start : span.end], end = int(span.version), span.end
    if end != num_tokens or (np.diff(versions) < 0).any():
        raise BadAnswer(f"weight versions {spans} cover {end} of {num_tokens} tokens")
    return versions


def _columns(values: Any, num_tokens: int, width: int) -> Any:
    if not num_tokens:
        return np.zeros((0, width), np.int32 if values is None else values.dtype)
    if values is None or values.ndim != 2 or len(values) < num_tokens or values.shape[1] < width:
        raise BadAnswer("the sampler's record lacks side data that was asked for")
    return values[:num_tokens, :width]


def _column(values: Any, num_tokens: int) -> Any:
    if values is None and not num_tokens:
        return np.zeros(0, np.float32)
    if values is None or values.ndim != 1 or len(values) < num_tokens:
        raise BadAnswer(f"the sampler's record does not hold one number for each of {num_tokens} tokens")
    return values[:num_tokens]
