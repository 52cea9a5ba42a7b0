"""The part of the vLLM adapter that runs inside vLLM's own Python: sampling, weight loading, and a guard at the door.

vLLM computes logits; `Sampling` draws from them with `headway.engine.sampler`, so a token depends on (seed, position)
alone and comes with exact log-probs, entropy, draws and kept mass, as from the built-in engine. `Worker` hands those
records out and loads weights. `Guard` asks for the key on every endpoint, not only on those vLLM guards itself.

Imports nothing beyond what vLLM's environment holds. Flags that load it are in `headway.engine.vllm_server`.
"""

import base64
import hmac
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor,
    process_dict_updates,
)

from headway.engine.sampler import Cut, Knobs, Sampled, sample, stream_of, uniforms
from headway.wire import encode

KEY = "headway"
"""The entry of a request's `extra_args` that asks for this sampler."""

NUM_REMEMBERED = 65_536
"""Requests whose records were taken, which a step under way may still sample for: more than a server runs at once."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(slots=True)
class Row:
    """One request in vLLM's running batch."""

    id: str
    num_prompt: int
    output: list[int]
    """vLLM's own list of what it has sampled so far, which grows."""
    stream: np.uint64
    temperature: float
    top_p: float
    top_k: int
    num_draws: int
    num_top: int


class Records:
    """What was sampled, until it is asked for. Tensors stay on their device until then."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[tuple[str, int]], Sampled]] = []
        self._tokens: dict[str, dict[int, tuple[dict[str, Any], int]]] = {}
        self._gone: dict[str, None] = {}
        """Taken or forgotten, the latest last."""

    def __len__(self) -> int:
        """Requests of which something is kept."""
        return len(self._tokens)

    def add(self, keys: list[tuple[str, int]], sampled: Sampled) -> None:
        """`keys[i]` = (request, index of its token) of row i."""
        self._steps.append((keys, sampled))

    def take(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Request to its arrays `[T, …]` by the names of `Sampled`, and forget them; an unknown request has none."""
        for keys, sampled in self._steps:
            arrays = {name: tensor.cpu().numpy() for name, tensor in sampled.items()}
            for row, (id, index) in enumerate(keys):
                # vLLM also samples after a part of a prompt and throws that token away: the last of an index counts.
                if id not in self._gone:
                    self._tokens.setdefault(id, {})[index] = (arrays, row)
        self._steps.clear()
        self._gone |= dict.fromkeys(ids)
        while len(self._gone) > NUM_REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return {id: _stack(self._tokens.pop(id, {})) for id in ids}

    def clear(self) -> None:
        self._steps.clear()
        self._tokens.clear()
        self._gone.clear()


def _stack(tokens: Mapping[int, tuple[dict[str, Any], int]]) -> dict[str, Any]:
    places = [tokens[index] for index in range(len(tokens))]
    names = set.intersection(*(set(arrays) for arrays, _ in places)) if places else set()
    columns = {name: [arrays[name][row] for arrays, row in places] for name in names}
    # Neighbors that ask for more draws widen a step: what was asked for is in the first columns.
    widths = {name: min((np.size(v) for v in values), default=1) for name, values in columns.items()}
    narrow = {name: [v[: widths[name]] if np.ndim(v) else v for v in values] for name, values in columns.items()}
    return {name: np.array(values, np.int32 if name.endswith("ids") else np.float32) for name, values in narrow.items()}


records = Records()
"""Of this worker process."""


class Sampling(LogitsProcessor):
    """Draws the tokens of requests that carry `extra_args["headway"]`, and leaves vLLM that one choice."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}
        self._device = device

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits
        where = sorted(self._rows)
        rows = [self._rows[i] for i in where]
        at = torch.tensor(where, device=logits.device)
        positions = np.array([row.num_prompt + len(row.output) for row in rows], np.int64)
        knobs = _knobs(rows, logits)
        u = uniforms(np.array([row.stream for row in rows]), positions, knobs.num_draws)
        sampled = sample(logits[at], knobs, torch.from_numpy(u).to(logits.device))
        records.add([(row.id, len(row.output)) for row in rows], sampled)
        logits[at] = -torch.inf
        logits[at, sampled.token_ids] = 0.0
        return logits


def _new_row(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Row | None:
    asked = (params.extra_args or {}).get(KEY)
    if asked is None:
        return None
    asked = dict(asked)
    return Row(num_prompt=len(prompt_ids or ()), output=output_ids, stream=stream_of(asked.pop("seed")), **asked)


def _knobs(rows: list[Row], logits: Tensor) -> Knobs:
    vocab_size, device = logits.shape[-1], logits.device
    temperatures = [row.temperature or 1.0 for row in rows]
    greedy = [row.temperature == 0 for row in rows]
    cut = [i for i, r in enumerate(rows) if r.temperature and (r.top_p < 1 or 0 < r.top_k < vocab_size)]
    top_k = [rows[i].top_k or vocab_size for i in cut]
    top_p = torch.tensor([rows[i].top_p for i in cut], device=device)
    return Knobs(
        temperature=torch.tensor(temperatures, device=device)[:, None] if any(t != 1 for t in temperatures) else None,
        cut=Cut(torch.tensor(cut, device=device), top_p, torch.tensor(top_k, device=device), max(top_k))
        if cut
        else None,
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        num_draws=max(row.num_draws for row in rows),
        num_top=max(row.num_top for row in rows),
    )


class Worker:
    """Mixed into vLLM's worker (`--worker-extension-cls`); called by name through `/collective_rpc`."""

    def headway_hello(self) -> dict[str, Any]:
        """Facts the client checks; forgets the records of whoever was here before."""
        records.clear()
        config: Any = self.model_config  # type: ignore[attr-defined]
        return {
            "tied": bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
            "vocab_size": config.get_vocab_size(),
            "max_length": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."),
        }

    def headway_load(self, path: str) -> None:
        """Load one safetensors file in place. A head that the file does not hold is its embedding."""
        self.model_runner.reload_weights(weights_iterator=_read(path))  # type: ignore[attr-defined]

    def headway_take(self, ids: str) -> str:
        """Records of the requests in a JSON list: base64 of msgpack, request to name to array."""
        return base64.b64encode(encode(records.take(json.loads(ids)))).decode()


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for name in names:
            yield name, file.get_tensor(name)
        if HEAD not in names and EMBEDDING in names:
            yield HEAD, file.get_tensor(EMBEDDING)


class Guard:
    """ASGI middleware (`--middleware`): no answer but `/health` without `Authorization: Bearer $VLLM_API_KEY`.

    Also ends the server when the process named by HEADWAY_PARENT is gone.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        if parent := os.environ.get("HEADWAY_PARENT"):
            threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == "/health" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
