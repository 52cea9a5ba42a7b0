"""A small HTTP/1.1 client on asyncio streams: JSON in, JSON out, one connection a request, sizes capped.

Closing the connection is how a request is canceled, so none is shared.
"""

import asyncio
import json
from contextlib import suppress
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

T = TypeVar("T")

MAX_BODY_BYTES = 256 << 20
MAX_LINE_BYTES = 64 << 10
MAX_HEADERS = 100

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Version = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
"""A weight version as servers carry it: the text of a number that fits an int32."""


class HttpError(RuntimeError):
    """The server answered, and its answer is no success: `status`, and what it said."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:2000]}")
        self.status = status


class BadAnswer(ConnectionError):
    """What came back is not HTTP, not JSON, or too long."""


class Http:
    """Requests to one server.

    Raises from every request: HttpError for a status of 400 or more, BadAnswer, and OSError when there is nobody.
    """

    def __init__(self, url: str, *, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine address {url!r} is no http(s) URL, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._key = key

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: Any = None) -> Any:
        return await self._request("POST", path, b"" if body is None else json.dumps(body).encode())

    async def _request(self, method: str, path: str, body: bytes) -> Any:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES)
        try:
            writer.write(self._head(method, path, len(body)) + body)
            await writer.drain()
            status, answer = await _read_answer(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise BadAnswer(f"{method} {path}: the answer broke off or is too long: {error}") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if status >= 400:
            raise HttpError(status, answer.decode(errors="replace"))
        return parsed(answer, f"{method} {path}")

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Accept: application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def parsed(answer: bytes, what: str) -> Any:
    """An answer's JSON, None when it is empty. Raises BadAnswer, beginning with `what`."""
    try:
        return json.loads(answer, parse_constant=_refuse) if answer.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"{what}: the answer is no JSON: {answer[:200]!r}") from error


def structured(answer: Any, kind: type[T]) -> T:
    """An answer as the struct that the server documents. Raises BadAnswer."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"the answer is not as documented: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    version, _, rest = (await _line(reader)).partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdecimal():
        raise BadAnswer(f"the answer begins with {version!r}, which is no HTTP/1.1")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        if not (line := await _line(reader)):
            break
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    else:
        raise BadAnswer(f"the answer has more than {MAX_HEADERS} headers")
    return int(code), await _read_body(reader, headers)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader)
    if (length := headers.get("content-length")) is not None:
        return await reader.readexactly(_size(length, 10))
    body = await reader.read(MAX_BODY_BYTES + 1)
    while part := await reader.read(MAX_BODY_BYTES + 1 - len(body)):
        body += part
    return body[: _size(str(len(body)), 10)]


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := _size((await _line(reader)).partition(";")[0], 16):
        _size(str(len(body) + size), 10)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)


async def _line(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n"))[:-2].decode("latin-1")


def _size(text: str, base: int) -> int:
    try:
        size = int(text.strip(), base)
    except ValueError as error:
        raise BadAnswer(f"a length of {text!r} makes no sense") from error
    if not 0 <= size <= MAX_BODY_BYTES:
        raise BadAnswer(f"an answer of {size:,} bytes is over the limit of {MAX_BODY_BYTES:,}")
    return size
