"""An HTTP server that answers as vLLM does, or as a test wrote down."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from headway.teacher.http import HttpTeacher
from headway.types import TeacherScores

TOKENS = np.array([4, 5, 6, 7], np.int32)
OWN = TOKENS[-2:, None]
Answer = Callable[[dict], tuple[int, Any]]


class FakeServer:
    """Answers `/v1/completions` with what the test wrote down, one function a request; the last one stays."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[tuple[dict, str | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((body, self.headers.get("Authorization")))
                code, answer = answers[min(len(fake.requests), len(answers)) - 1](body)
                data = json.dumps(answer).encode()
                self.send_response(code if self.path == "/v1/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(BrokenPipeError):  # a client that timed out has hung up
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def scored(body: dict) -> tuple[int, Any]:
    """As vLLM: nothing for the first token, then the token's own entry beside the most likely ids."""
    entries: list[Any] = [None]
    for token in body["prompt"][1:]:
        likely = {str(id): {"logprob": -1.0 - id, "rank": id + 1} for id in range(body["prompt_logprobs"])}
        own = {"logprob": -9.0, "rank": 9, "decoded_token": chr(60 + token)}
        entries.append(likely | {str(token): own})
    return 200, {"choices": [{"text": "x", "prompt_logprobs": entries}]}


def down(body: dict) -> tuple[int, Any]:
    return 503, {"error": "loading"}


def teacher_at(server: FakeServer, said: list[str] | None = None, **options: Any) -> HttpTeacher:
    options = {"vocab_size": 50, "timeout_s": 5.0, "max_failures": 3, "key": "", "first_pause_s": 0.01} | options
    say = (said if said is not None else []).append
    return HttpTeacher(server.url, model="big", say=say, **options)


def ask(teacher: HttpTeacher, query_ids: np.ndarray = OWN, num_top: int = 0) -> TeacherScores:
    async def once() -> TeacherScores:
        try:
            return await teacher.score(TOKENS, query_ids, num_top)
        finally:
            await teacher.close()

    return asyncio.run(once())
