"""Engines as their callers see them: a server each, with one small model, and clients with options of their own."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fake_sglang import FakeSglang
from tiny_models import VOCAB
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.engine.hosting import Client
from headway.engine.messages import EngineSettings
from headway.engine.process import EngineProcess, start_engine
from headway.engine.sglang import SglangEngine
from headway.engine.sglang_server import client_options as sglang_options
from headway.engine.vllm import VllmEngine
from headway.engine.vllm_server import client_options as vllm_options
from headway.engine.vllm_server import start_vllm
from headway.models.loading import named_weights
from headway.types import WeightRef
from headway.weights import CollectiveChannel, DiskChannel, read_weights
from headway.weights.servers import ServerSender

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = os.environ.get("HEADWAY_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
KEY = "a key for tests"
MAX_LENGTH = 512


def build(seed: int = 0) -> Any:
    """A Qwen3 with tied embeddings, of a shape that every engine runs."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float().eval()


@dataclass
class Harness:
    """One kind of engine. What a kind cannot give, it refuses by name, and its tests say so."""

    kind: str
    place: Path
    has_entropy: bool = True
    has_draws: bool = True
    has_truncation: bool = True
    keeps: bool = True
    """Whether an update may keep cached keys and values."""
    _version: int = 0
    _closing: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.place / "model"
        build().save_pretrained(self.model)
        self._channel = DiskChannel(self.place / "weights")

    def publish(self, model: Any, **changes: torch.Tensor | None) -> WeightRef:
        """A new version, higher than all before; `changes` replace or (None) remove tensors."""
        self._version += 1
        tensors = {name: t for name, t in (named_weights(model) | changes).items() if t is not None}
        return self._channel.publish(self._version, tensors)

    def run(self, work: Callable[[Client], Awaitable[Any]], model: Any = None, **options: Any) -> Any:
        """Call `work(client)` with a client that belongs to this call's event loop, on the weights of `model`."""

        async def main() -> Any:
            client = self._client(**options)
            try:
                await client.update_weights(self.publish(model or build()))
                return await work(client)
            finally:
                client.close()

        return asyncio.run(main())

    def _client(self, **options: Any) -> Client:
        raise NotImplementedError

    def close(self) -> None:
        for close in self._closing:
            close()


class Torch(Harness):
    _processes: dict[Any, EngineProcess] | None = None

    def _client(self, **options: Any) -> Client:
        from headway.engine.client import EngineClient

        self._processes = self._processes or {}
        key = tuple(sorted(options.items()))
        if key not in self._processes:
            records = options.pop("record_logprobs", True)
            settings = EngineSettings(
                config=str(self.model),
                max_slots=options.pop("max_slots", 4),
                max_length=MAX_LENGTH,
                record_logprobs=records,
                record_entropy=records,
                **options,
            )
            log = self.place / f"engine-{len(self._processes)}.log"
            self._processes[key] = process = start_engine(settings, "torch", log, token=KEY)
            self._closing.append(process.stop)
        return EngineClient(self._processes[key].client.endpoint, KEY)


class Sglang(Harness):
    _server: FakeSglang | None = None

    def _client(self, **options: Any) -> Client:
        if self._server is None:
            self._server = FakeSglang(self.model, key=KEY, max_length=MAX_LENGTH).start()
            self._closing.append(self._server.stop)
        settings = EngineSettings(config=str(self.model), max_slots=4, max_length=MAX_LENGTH)
        return SglangEngine(
            self._server.url, key=KEY, place=self.place / "served", **sglang_options(settings, "sglang", 60.0) | options
        )


class Broadcasting:
    """A client whose updates come by broadcast; else the client itself."""

    def __init__(self, client: Any, channel: Callable[[WeightRef], CollectiveChannel]) -> None:
        self._client, self._channel = client, channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def update_weights(self, ref: WeightRef) -> None:
        """The same tensors, through the channel that the harness has for them."""
        channel = await asyncio.to_thread(self._channel, ref)
        await channel.deliver(channel._published[0], self._client)  # pyright: ignore[reportOptionalSubscript]


class SglangBroadcast(Sglang):
    """The same server, given its versions by `weights = "collective"`."""

    _sender: CollectiveChannel | None = None

    def _client(self, **options: Any) -> Any:
        return Broadcasting(super()._client(**options), self._sending)

    def _sending(self, ref: WeightRef) -> CollectiveChannel:
        tensors = read_weights(ref)
        try:
            self._sender = self._sender or self._channel_for_servers()
            self._sender.publish(ref.version, tensors)
        except ValueError as error:
            if "layout" not in str(error):
                raise
            self._sender = self._channel_for_servers()
            self._sender.publish(ref.version, tensors)
        return self._sender

    def _channel_for_servers(self) -> CollectiveChannel:
        channel = broadcasts(timeout_s=5.0)
        self._closing.append(channel.close)
        return channel


def broadcasts(*, say: Callable[[str], None] = print, timeout_s: float = 20.0, width: int = 1) -> CollectiveChannel:
    """What `weights = "collective"` is for servers, on loopback."""
    return CollectiveChannel(dtype=None, timeout_s=timeout_s, say=say, sender=partial(ServerSender, width=width))


class Vllm(Harness):
    _url = ""
    _key = ""

    def _client(self, **options: Any) -> Client:
        settings = EngineSettings(config=str(self.model), max_slots=8, max_length=MAX_LENGTH)
        if not self._url:
            assert os.access(VLLM_PYTHON, os.X_OK), f"no vLLM at {VLLM_PYTHON}: run `make test-vllm`"
            host = start_vllm(settings, "vllm", self.place / "engine.log", python=VLLM_PYTHON, start_timeout_s=900)
            self._closing.append(host.stop)
            self._url, self._key = host.client.endpoint, host.client._http._key
        merged: dict[str, Any] = vllm_options(settings, "vllm", 60.0) | {"max_slots": 4} | options
        return VllmEngine(self._url, key=self._key, **merged)


def make_harness(kind: str, place: Path) -> Harness:
    if kind == "torch":
        return Torch(kind, place)
    if kind == "vllm":
        return Vllm(kind, place)
    made = SglangBroadcast if kind == "sglang-broadcast" else Sglang
    return made("sglang", place, has_entropy=False, has_draws=False, has_truncation=False, keeps=False)
