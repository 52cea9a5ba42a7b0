"""The small HTTP client, and an engine behind it, against servers that misbehave."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import http
from headway.engine.hosting import JoinedServer, wait_healthy
from headway.engine.http import BadAnswer, Http, HttpError
from headway.engine.sglang import SglangEngine
from headway.engine.turnstile import Turnstile
from headway.errors import AccessRefused
from headway.protocols import EngineDied, RequestRefused
from headway.types import Sampling

OK = b"HTTP/1.1 200 OK\r\n"


def talk(answer: bytes, work: Callable[[str], Awaitable[Any]]) -> Any:
    """Run `work(url)` against a server that sends these bytes to everyone and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(answer)
        writer.close()

    async def main() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(main())


def get(answer: bytes) -> Any:
    return talk(answer, lambda url: Http(url, key="k").get("/x"))


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 7\r\n\r\n[1, 23]",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n4;x=y\r\n 23]\r\n0\r\n\r\n",
        OK + b"\r\n[1, 23]",
    ],
)
def test_bodies_come_with_a_length_in_chunks_or_up_to_the_end(answer: bytes):
    assert get(answer) == [1, 23]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: x\r\n\r\n",
        OK + b"Content-Length: 99999999999\r\n\r\n",
        OK + b"Content-Length: 50\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"\r\n<html>",
        OK + b"A: " + b"b" * 70_000 + b"\r\n\r\n",
        OK + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
def test_what_is_no_answer_is_said_to_be_none(answer: bytes):
    with pytest.raises(BadAnswer):
        get(answer)


@given(st.binary(max_size=200))
@settings(max_examples=30, deadline=None)
def test_any_bytes_are_an_answer_or_a_named_error(noise: bytes):
    for prefix in (b"", OK + b"Transfer-Encoding: chunked\r\n\r\n", OK + b"\r\n"):
        try:
            get(prefix + noise)
        except (BadAnswer, HttpError):
            continue


def test_an_answer_over_the_limit_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 100)
    for head in (b"\r\n", b"Content-Length: 101\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n65\r\n"):
        with pytest.raises(BadAnswer, match="limit of 100"):
            get(OK + head + b" " * 101)


def test_a_refusal_carries_its_text():
    with pytest.raises(HttpError, match="HTTP 404: nothing here") as error:
        get(b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\n\r\nnothing here")
    assert error.value.status == 404


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(ValueError, match="no http"):
        Http(url)


def engine_at(url: str, place: Path) -> SglangEngine:
    return SglangEngine(
        url,
        key="k",
        model=place,
        place=place,
        num_layers=1,
        name="e",
        vocab_size=9,
        max_slots=1,
        max_length=9,
        expected={},
    )


def ask(answer: bytes, tmp_path: Path) -> Any:
    async def work(url: str) -> Any:
        engine = engine_at(url, tmp_path)
        try:
            return await engine.generate(np.array([1], np.int32), Sampling(max_tokens=2))
        finally:
            assert engine.num_pending == 0

    return talk(answer, work)


@pytest.mark.parametrize(
    "answer",
    [b"", OK + b"\r\n{}", OK + b"\r\n[]", OK + b"\r\n", b"HTTP/1.1 500 X\r\n\r\nit broke"],
)
def test_an_engine_that_answers_nonsense_is_lost_by_name(answer: bytes, tmp_path: Path):
    with pytest.raises(EngineDied, match=r"engine 'e' at http.* is lost"):
        ask(answer, tmp_path)


def test_a_server_whose_log_is_elsewhere_is_lost_with_the_reason(tmp_path: Path):
    async def work(url: str) -> str:
        server = JoinedServer(engine_at(url, tmp_path))
        assert "lost" not in server.log_tail()
        with pytest.raises(EngineDied):
            await server.client.generate(np.array([1], np.int32), Sampling(max_tokens=2))
        return server.log_tail()

    assert re.search(r"joined at http.*\nengine 'e' at http.* is lost: .*not as documented", talk(OK + b"\r\n[]", work))


def test_a_request_the_server_refuses_and_a_wrong_key_are_told_apart(tmp_path: Path):
    with pytest.raises(RequestRefused, match="too long"):
        ask(b"HTTP/1.1 400 X\r\n\r\ntoo long", tmp_path)
    with pytest.raises(AccessRefused, match=r"engine 'e' at http.* refused: HTTP 401.*engines.api_key_env"):
        ask(b"HTTP/1.1 401 X\r\n\r\n", tmp_path)


def test_what_a_silent_server_was_asked_is_given_back_and_the_engine_goes_on(tmp_path: Path):
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the client hangs up
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            engine = engine_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path)
            calls = [
                asyncio.ensure_future(engine.generate(np.array([1], np.int32), Sampling(max_tokens=2)))
                for _ in range(3)  # one inside, two waiting for its slot
            ]
            await asyncio.sleep(0.1)
            engine.give_back(EngineDied("silent"))
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, EngineDied) and str(outcome) == "silent"
            assert engine.num_pending == 0 and not engine.is_lost

    asyncio.run(main())


def test_a_turnstile_lets_in_by_priority_and_nobody_while_shut():
    async def work() -> list[str]:
        gate, order = Turnstile(1), []

        async def pass_through(name: str, priority: int) -> None:
            if await gate.enter(priority):
                order.append(name)
                await asyncio.sleep(0)
                gate.leave()

        gate.shut()
        tasks = [asyncio.create_task(pass_through(*who)) for who in (("b", 0), ("c", 0), ("gone", -2), ("a", -1))]
        await asyncio.sleep(0.01)
        assert order == [] and gate.num_waiting == 4
        tasks[2].cancel()
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.shut()
        late = asyncio.create_task(gate.enter(0))
        await asyncio.sleep(0)
        gate.turn_away()
        assert await late is False
        return order

    assert asyncio.run(work()) == ["a", "b", "c"]


def test_a_slot_given_to_one_who_just_left_goes_to_the_next():
    async def work() -> bool:
        gate = Turnstile(1)
        first = asyncio.create_task(gate.enter(0))
        second = asyncio.create_task(gate.enter(0))
        await asyncio.sleep(0)
        await first
        gate.leave()  # admits the second …
        second.cancel()  # … who is canceled before it wakes
        await asyncio.gather(second, return_exceptions=True)
        async with asyncio.timeout(1):
            return await gate.enter(0)

    assert asyncio.run(work())


def asked_for_health(raw: bytes) -> bool:
    """Whether a server that answers these bytes is found healthy."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            return wait_healthy(f"http://127.0.0.1:{server.server_port}", 0.2)
        finally:
            server.shutdown()
            thread.join()


def test_a_server_is_asked_for_its_health_past_any_proxy(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert asked_for_health(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("raw", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n", b""])
def test_what_does_not_speak_http_or_says_no_is_not_healthy(raw: bytes):
    assert not asked_for_health(raw)
