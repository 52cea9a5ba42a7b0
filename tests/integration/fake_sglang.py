"""A server that speaks SGLang's documented HTTP API with the built-in engine behind it. No line of SGLang runs here.

Broadcasts reach processes of their own, one for each tensor-parallel rank, as in SGLang: `fake_sglang_rank.py`.
"""

import asyncio
import base64
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig

from headway.engine.torch_engine import TorchEngine
from headway.types import Completion, Sampling

NUM_EXPERTS_CHOSEN = 2


class Unsuccessful(ValueError):
    """Answered with 400 and `success: false`."""


class FakeSglang:
    """Runs in a thread of its own; `url` once started. `log` holds (path, body) of every request.

    `num_ranks`: its tensor-parallel size, though all compute the same here. `has_sessions`: whether broadcasts want
    `/begin_weight_update` before them. `dies_after`: tensors of a broadcast that the server outlives.
    """

    dies_after: int | None = None
    num_torn_steps = 0
    """Steps computed while only a part of a version was there."""

    def __init__(self, model: Path, *, key: str, max_slots: int = 8, max_length: int = 64, **options: Any) -> None:
        self._engine = TorchEngine(AutoConfig.from_pretrained(model), max_slots=max_slots, max_length=max_length)
        self._num_layers = AutoConfig.from_pretrained(model).num_hidden_layers
        self._engine.load(_weights(model), 0)
        self._label, self._key = "default", key
        self._is_paused = False
        self._num_ranks, self._has_sessions = options.get("num_ranks", 1), options.get("has_sessions", True)
        self._ranks: list[asyncio.subprocess.Process] = []
        self._place = tempfile.TemporaryDirectory()
        self._received: dict[str, Any] = {}
        self._has_session = False
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._held: list[Callable[[], None]] = []
        self.log: list[tuple[str, Any]] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def start(self) -> "FakeSglang":
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(20)

    async def _main(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        pump = asyncio.create_task(self._pump())
        await self._stopped.wait()
        pump.cancel()
        server.close()
        for rank in self._ranks:
            if rank.returncode is None:
                rank.kill()
            await rank.wait()
        self._place.cleanup()

    async def _pump(self) -> None:
        while True:
            if self._engine.has_work and not self._is_paused:
                self.num_torn_steps += bool(self._received)
                self._resolve(self._engine.step())
            await asyncio.sleep(0.002)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else None
        status, answer = 401, {"error": "Unauthorized"}
        if path == "/health" or headers.get("authorization") == f"Bearer {self._key}":
            self.log.append((path, body))
            try:
                status, answer = 200, await getattr(self, "_" + path.strip("/"), self._unknown)(body)
            except Unsuccessful as error:
                status, answer = 400, {"success": False, "message": str(error)}
            except ConnectionError:  # a rank died: so does the server
                writer.transport.abort()
                self._stopped.set()
                return
            except NotImplementedError:
                status, answer = 404, {"detail": "Not Found"}
            except ValueError as error:
                status, answer = 400, {"error": {"message": str(error)}}
        data = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        writer.close()

    async def _health(self, body: Any) -> Any:
        return {}

    async def _unknown(self, body: Any) -> Any:
        raise NotImplementedError

    async def _server_info(self, body: Any) -> Any:
        return {"tp_size": self._num_ranks, "pp_size": 1, "dp_size": 1, "version": "0"}

    async def _generate(self, body: Any) -> Any:
        rid, s = body["rid"], body["sampling_params"]
        assert s["top_p"] == 1.0 and s["top_k"] == -1 and s["ignore_eos"] and not body["stream"]
        sampling = Sampling(
            max_tokens=s["max_new_tokens"],
            seed=s["sampling_seed"],
            temperature=s["temperature"],
            stop_token_ids=tuple(s["stop_token_ids"]),
            num_top=body["top_logprobs_num"],
        )
        self._futures[rid] = future = self._loop.create_future()
        submit = lambda: self._engine.submit(rid, body["input_ids"], sampling)  # noqa: E731
        self._held.append(submit) if self._is_paused else submit()
        completion = await future
        return self._answer(completion, len(body["input_ids"]), body)

    async def _pause_generation(self, body: Any) -> Any:
        assert body == {"mode": "abort"}
        self._is_paused = True
        self._resolve(self._engine.interrupt())
        return {}

    async def _continue_generation(self, body: Any) -> Any:
        self._is_paused = False
        for submit in self._held:
            submit()
        self._held.clear()
        return {}

    async def _abort_request(self, body: Any) -> Any:
        # The built-in engine hands back all or none: the others begin again, unnoticed, with the same draws.
        again = {request.id: request for request in (*self._engine._slots.requests, *self._engine._waiting) if request}
        for id, completion in self._engine.interrupt():
            if id == body["rid"]:
                self._resolve([(id, completion)])
            else:
                self._engine.submit(id, again[id].token_ids.tolist(), again[id].sampling)
        return {}

    async def _update_weights_from_disk(self, body: Any) -> Any:
        assert self._is_paused and body["flush_cache"]
        self._engine.load(_weights(Path(body["model_path"])), int(body["weight_version"]))
        self._received = {}
        self._label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def _init_weights_update_group(self, body: Any) -> Any:
        assert body.keys() == {*("master_address", "master_port", "rank_offset", "world_size"), "group_name", "backend"}
        return await self._tell("init", body)

    async def _destroy_weights_update_group(self, body: Any) -> Any:
        return await self._tell("destroy", body)

    async def _begin_weight_update(self, body: Any) -> Any:
        if not self._has_sessions:
            raise NotImplementedError
        if self._has_session:
            raise Unsuccessful("a weight-update session is already open; call end_weight_update() first")
        self._has_session = True
        return {"success": True, "message": "Success"}

    async def _end_weight_update(self, body: Any) -> Any:
        if not self._has_session:
            raise Unsuccessful("no weight-update session is open; call begin_weight_update() first")
        self._has_session = False
        return {"success": True, "message": "Success"}

    async def _update_weights_from_distributed(self, body: Any) -> Any:
        assert self._is_paused and body["flush_cache"] == ("weight_version" in body)
        if self._has_sessions and not self._has_session:
            raise Unsuccessful("must run between begin_weight_update() and end_weight_update()")
        self._received = self._received or {"": None}  # whatever comes of it, the model is torn
        told = await self._tell("update", body | {"dies_after": self.dies_after})
        self._received |= load_file(told["message"])
        if "weight_version" in body:
            self._received.pop("")
            try:
                self._engine.load(self._received, int(body["weight_version"]))
            except ValueError as error:
                reason = f"Failed to update parameter online: {error}. Please discard the whole weights."
                raise Unsuccessful(reason) from error
            finally:
                self._received = {"": None}
            self._received, self._label = {}, body["weight_version"]
        return {"success": True, "message": "Succeeded to update parameter online."}

    async def _tell(self, do: str, order: Any) -> Any:
        """All ranks; the first one's answer is the server's."""
        while len(self._ranks) < self._num_ranks:
            script = Path(__file__).with_name("fake_sglang_rank.py")
            command = [sys.executable, str(script), str(len(self._ranks)), self._place.name, str(os.getpid())]
            pipes: Any = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": 1 << 20}
            self._ranks.append(await asyncio.create_subprocess_exec(*command, **pipes))
        answers = await asyncio.gather(*(self._tell_one(rank, do, order) for rank in self._ranks))
        if not answers[0]["success"]:
            raise Unsuccessful(answers[0]["message"])
        return answers[0]

    async def _tell_one(self, rank: asyncio.subprocess.Process, do: str, order: Any) -> Any:
        assert rank.stdin is not None and rank.stdout is not None
        rank.stdin.write(json.dumps(order | {"do": do}).encode() + b"\n")
        await rank.stdin.drain()
        line = await rank.stdout.readline()
        if not line:
            raise ConnectionError(f"rank ended ({await rank.wait()})")
        return json.loads(line)

    def _resolve(self, finished: list[tuple[Any, Completion]]) -> None:
        for id, completion in finished:
            self._futures.pop(id).set_result(completion)

    def _answer(self, c: Completion, num_prompt: int, body: Any) -> Any:
        reason = {"interrupt": "abort"}.get(c.finish_reason, c.finish_reason)
        label = str(c.versions[0]) if len(c.versions) else self._label
        assert c.logprobs is not None
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": reason},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(c.token_ids),
            "weight_version": label,
            "output_token_logprobs": [[float(p), int(t), None] for p, t in zip(c.logprobs, c.token_ids, strict=True)],
        }
        if body["top_logprobs_num"]:
            assert c.side.top_ids is not None and c.side.top_logprobs is not None
            rows = zip(c.side.top_logprobs, c.side.top_ids, strict=True)
            meta["output_top_logprobs"] = [
                [[float(p), int(t), None] for p, t in zip(*row, strict=True)] for row in rows
            ]
        if body["return_routed_experts"]:
            shape = (num_prompt + len(c.token_ids) - 1, self._num_layers, NUM_EXPERTS_CHOSEN)
            experts = np.arange(np.prod(shape), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return {"text": "", "output_ids": c.token_ids.tolist(), "meta_info": meta}


def _weights(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
