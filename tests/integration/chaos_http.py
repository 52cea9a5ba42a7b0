"""HTTP servers that misbehave now and then: a proxy before an engine, and a teacher."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

GARBLED: dict[str, Callable[[bytes], bytes | None]] = {
    "no answer": lambda body: None,
    "cut short": lambda body: body[: len(body) // 2],
    "not JSON": lambda body: b"<html>502 Bad Gateway</html>",
    "wrong types": lambda body: b'{"output_ids": "one", "meta_info": 3, "choices": [{"prompt_logprobs": 7}]}',
    "NaN": lambda body: body.replace(b"[-", b"[NaN, -", 1).replace(b'"logprob": -', b'"logprob": NaN, "x": -', 1),
    "positive log-prob": lambda body: body.replace(b"[-", b"[", 1).replace(b'"logprob": -', b'"logprob": ', 1),
    "negative token": lambda body: body.replace(b'"output_ids": [', b'"output_ids": [-').replace(
        b'"rank"', b'"logprob"'
    ),
    "deeply nested": lambda body: b"[" * 200_000,
    "huge": lambda body: b" " * (300 << 20),
}
"""What becomes of the body of an answer; None hangs up without one."""


class Server:
    """An asyncio server in a thread of its own; `answer(head, body)` gives the bytes of an answer, or None to hang up.

    `num_faults` counts what it did on purpose.
    """

    def __init__(self) -> None:
        self.num_faults, self.url = 0, ""
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True).start()
        assert self._ready.wait(20)

    async def _main(self) -> None:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            answer = await self.answer(head, await reader.readexactly(length))
            if answer is not None:
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has hung up
        finally:
            writer.close()

    async def answer(self, head: bytes, body: bytes) -> bytes | None:
        raise NotImplementedError


class Proxy(Server):
    """Passes on to an engine's server, and garbles every `every`-th generation, each time in another way."""

    def __init__(self, url: str, *, every: int, skip: int = 8) -> None:
        self._to, self._every, self._skip, self._num = urlsplit(url), every, skip, 0
        super().__init__()

    async def answer(self, head: bytes, body: bytes) -> bytes | None:
        reader, writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        writer.write(head + body)
        answer = await reader.read()
        writer.close()
        if not head.startswith(b"POST /generate"):
            return answer
        self._num += 1
        if self._num <= self._skip or self._num % self._every:
            return answer
        garbled = list(GARBLED.values())[self.num_faults % len(GARBLED)](answer.partition(b"\r\n\r\n")[2])
        self.num_faults += 1
        return None if garbled is None else whole(garbled)


class Teacher(Server):
    """Like vLLM's `/v1/completions`; finds all tokens equally likely, and garbles every `every`-th answer."""

    def __init__(self, *, every: int) -> None:
        self._every, self._num = every, 0
        super().__init__()

    async def answer(self, head: bytes, body: bytes) -> bytes | None:
        prompt, num_top = (asked := json.loads(body))["prompt"], asked["prompt_logprobs"]
        entries: list[Any] = [None]
        for token in prompt[1:]:
            ids = [token, *range(num_top)]
            entries.append({str(id): {"logprob": -3.0, "rank": 1} for id in ids})
        data = json.dumps({"choices": [{"text": "", "prompt_logprobs": entries}]}).encode()
        self._num += 1
        if self._num % self._every:
            return whole(data)
        garbled = list(GARBLED.values())[self.num_faults % len(GARBLED)](data)
        self.num_faults += 1
        return None if garbled is None else whole(garbled)


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
