"""A teacher behind an OpenAI-compatible server that returns prompt log-probs (vLLM: `/v1/completions`).

Such a server reports the tokens of the prompt and the most likely ids beside them, never the log-prob of a chosen id:
it can feed the cache `teacher_topk`, and Monte Carlo of one draw, the token itself.
"""

import asyncio
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from headway.protocols import RequestRefused, TeacherLost
from headway.types import LOGPROB_SLACK, Ints, TeacherScores
from headway.wire import decode_json

MOST_CONNECTIONS = 32
LONGEST_PAUSE_S = 30.0
MOST_BYTES = 256 << 20

IMPOSSIBLE = -9999.0
"""What vLLM writes for −∞, which JSON cannot say: an id that the server's model never samples."""

LOWEST = float(np.finfo(np.float32).min)
"""What is below would be −∞ in float32."""

MOST_MASS = 1.1
"""Of the ids at one position; above 1 for what a server rounds."""

CONNECT_S = 10.0
"""A server that is there answers a connection at once, however long its answers take."""

_TRY_AGAIN = frozenset({408, 409, 425, 429})  # and every status from 500 on
_THIS_REQUEST = frozenset({400, 413, 422})


class Entry(msgspec.Struct, frozen=True):
    """What the server says of one id at one position."""

    logprob: float
    decoded_token: str | None = None


Position = dict[int, Entry] | None
"""By id: the token itself and the most likely ones; None for the first token, which nothing predicts."""


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[Position]


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class BadStatus(OSError):
    """The server answered with another status than 200."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code = code


class BadAnswer(ValueError):
    """The answer does not hold what was asked for."""


class HttpTeacher:
    """Asks one server; an attempt that fails or takes longer than `timeout_s` is made again, with growing pauses.

    Args:
        url: without the path, such as `http://127.0.0.1:8000`.
        model: the name the server serves it under.
        key: sent as a bearer token; empty for none.
        vocab_size: the student's; ids from here on are padding of the teacher's head and not reported.
        max_failures: attempts of one request in a row, after which TeacherLost stops the run.
        say: told of the first failure after a success.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        key: str,
        vocab_size: int,
        timeout_s: float,
        max_failures: int,
        say: Callable[[str], None],
        first_pause_s: float = 1.0,
    ) -> None:
        self._url, self._model, self._key = url.rstrip("/").removesuffix("/v1"), model, key
        self._vocab_size = vocab_size
        self._timeout_s, self._max_failures, self._first_pause_s = timeout_s, max_failures, first_pause_s
        self._say = say
        self._threads = ThreadPoolExecutor(MOST_CONNECTIONS, thread_name_prefix="teacher")
        self._open: set[HTTPConnection] = set()
        self._num_pending = 0
        self._trouble = ""
        self._closed = False
        self.num_retries = 0
        self.busy_s = 0.0

    async def score(self, token_ids: Ints, query_ids: Ints, num_top: int) -> TeacherScores:
        """See `headway.protocols.Teacher`; `query_ids` must be the tokens themselves, `[T, 1]`."""
        num_scored = len(query_ids)
        if not np.array_equal(query_ids, token_ids[-num_scored:, None]):
            raise RequestRefused("an HTTP teacher scores the tokens of the response alone")
        self._num_pending += 1
        try:
            return await self._persist(token_ids, num_scored, num_top)
        finally:
            self._num_pending -= 1

    async def run(self) -> None:
        """Nothing to keep alive: whoever runs the server does that."""

    async def close(self) -> None:
        """Hang up, also on requests under way: a thread that waits for an answer would keep the process from ending."""
        self._closed = True  # before a look at who is connected: who connects from now on hangs up himself
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._open):
            if (sock := connection.sock) is not None:
                with suppress(OSError):  # it may have ended meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def describe(self) -> str:
        trouble = f"; its last answer: {self._trouble}" if self._trouble else ""
        return f"the teacher at {self._url} ({self._num_pending} requests pending{trouble})"

    def ask(self, token_ids: Sequence[int], num_top: int) -> list[Position]:
        """One attempt, blocking: what the server says of every token. Raises OSError, HTTPException, BadAnswer."""
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            # The token itself comes besides; 0 would be taken for "none" by some versions.
            "prompt_logprobs": max(1, num_top),
        }
        data = self._post(msgspec.json.encode(body))
        try:
            answer = decode_json(data, _Answer)
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"no prompt_logprobs as vLLM gives them: {error}") from error
        found = [len(choice.prompt_logprobs) for choice in answer.choices]
        if found != [len(token_ids)]:
            raise BadAnswer(f"{found} prompt log-probs came back for {len(token_ids)} tokens")
        return answer.choices[0].prompt_logprobs

    def _post(self, body: bytes) -> bytes:
        url = urlsplit(self._url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=min(CONNECT_S, self._timeout_s))
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        self._open.add(connection)
        try:
            self._connect(connection)
            connection.request("POST", f"{url.path}/v1/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise BadStatus(response.status, response.read(500).decode(errors="replace"))
            return _read(response, time.monotonic() + self._timeout_s)
        finally:
            self._open.discard(connection)
            connection.close()

    def _connect(self, connection: HTTPConnection) -> None:
        try:
            connection.connect()
        except TimeoutError as error:  # no matter of `timeout_s`, unlike every later one
            raise ConnectionError(f"no connection within {min(CONNECT_S, self._timeout_s):g} s") from error
        connection.sock.settimeout(self._timeout_s)
        if self._closed:
            raise ConnectionAbortedError("the run has ended")

    async def _persist(self, token_ids: Ints, num_scored: int, num_top: int) -> TeacherScores:
        loop = asyncio.get_running_loop()
        num_failures, pause_s = 0, self._first_pause_s
        while True:
            try:
                positions = await loop.run_in_executor(self._threads, self.ask, token_ids.tolist(), num_top)
                scores = read_positions(positions[-num_scored:], token_ids[-num_scored:], num_top, self._vocab_size)
            except (OSError, HTTPException, BadAnswer) as error:  # a time-out is an OSError
                self._judge(error)
                num_failures += 1
                if num_failures == self._max_failures:
                    raise self._lost(error) from error
                self.num_retries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self._trouble = ""
                return scores

    def _judge(self, error: Exception) -> None:
        """Say the first failure that another attempt may mend; raise for one that it cannot."""
        reason = _said(error)
        if isinstance(error, BadStatus) and error.code < 500 and error.code not in _TRY_AGAIN:
            if error.code in _THIS_REQUEST:
                raise RequestRefused(f"the teacher at {self._url} refused: {reason}") from error
            raise TeacherLost(f"the teacher at {self._url} answers {reason}; check its URL, key and model") from error
        if not self._trouble:
            self._say(f"the teacher at {self._url} failed ({reason}); asking again")
        self._trouble = reason

    def _lost(self, error: Exception) -> TeacherLost:
        if isinstance(error, TimeoutError):
            mend = f"raise distill.timeout_s from {self._timeout_s:g}, or give the server more to compute with"
        elif isinstance(error, BadAnswer):
            mend = "let it return prompt_logprobs as vLLM does (of distill.top_k ids: --max-logprobs)"
        else:
            mend = "start it again"
        return TeacherLost(
            f"the teacher at {self._url} failed {self._max_failures} times in a row ({_said(error)}); {mend}, then "
            "`headway resume` the run"
        )


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _read(response: HTTPResponse, deadline: float) -> bytes:
    """The body, however slowly it drips. Raises TimeoutError, BadAnswer for one that is too long."""
    body = bytearray()
    while part := response.read1(1 << 20):
        body += part
        if len(body) > MOST_BYTES:
            raise BadAnswer(f"an answer of more than {MOST_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer was not complete in time, {len(body):,} bytes came")
    return bytes(body)


def read_positions(positions: Sequence[Position], token_ids: Ints, num_top: int, vocab_size: int) -> TeacherScores:
    """Log-probs of the tokens, and the `num_top` most likely ids, all below `vocab_size`.

    Raises BadAnswer if one lacks, and RequestRefused for what another attempt would bring again: a token to which the
    teacher gives probability 0, which is no log-prob to learn from (among the most likely it stays: q = 0 adds 0), and
    a top that reaches into the padding of its head.
    """
    own = np.empty((len(token_ids), 1), np.float32)
    top_ids = np.empty((len(token_ids), num_top), np.int32)
    top = np.empty((len(token_ids), num_top), np.float32)
    for t, (position, token) in enumerate(zip(positions, token_ids.tolist(), strict=True)):
        found = {id: entry.logprob for id, entry in (position or {}).items()}
        where = f"at position {t} of the response"
        own[t] = _own(found, token, where)
        top_ids[t] = _likely(found, num_top, vocab_size, where)
        top[t] = [found[id] for id in top_ids[t]]
    return TeacherScores(own, top_ids, top) if num_top else TeacherScores(own)


def _own(found: Mapping[int, float], token: int, where: str) -> float:
    if token not in found:
        raise BadAnswer(f"no log-prob of token {token} {where}")
    for id, logprob in found.items():
        if not LOWEST <= logprob <= LOGPROB_SLACK:
            raise BadAnswer(f"log-prob {logprob} of token {id} {where} is not a finite number <= 0")
    if (total := sum(map(math.exp, found.values()))) > MOST_MASS:
        raise BadAnswer(f"the probabilities {where} add up to {total:.2f}: these are no log-probs of one distribution")
    if found[token] <= IMPOSSIBLE:
        raise RequestRefused(
            f"the teacher gives token {token} {where} probability 0 (log-prob {found[token]:g}): an id that its server "
            "masks, or one of padding; teacher and student must share ids"
        )
    return found[token]


def _likely(found: Mapping[int, float], num_top: int, vocab_size: int, where: str) -> list[int]:
    likely = sorted(found, key=lambda id: (-found[id], id))[:num_top]
    if len(likely) < num_top:
        raise BadAnswer(f"{len(likely)} log-probs {where}, {num_top} were asked for")
    if padding := [id for id in likely if not 0 <= id < vocab_size]:
        raise RequestRefused(
            f"among the teacher's {num_top} most likely ids {where} is {padding[0]}, padding of its head beyond the "
            f"student's {vocab_size}; lower distill.top_k"
        )
    return likely


def check_server(teacher: HttpTeacher, prompt: Sequence[int], num_top: int, *, decode: Callable[[int], str]) -> None:
    """Ask about one prompt: does the server answer, and do its ids mean the student's tokens?

    Raises what `ask` does, and BadAnswer naming the first id that the server shows as another text.
    """
    positions = teacher.ask(prompt, num_top)
    read_positions(positions[1:], np.array(prompt[1:], np.int32), num_top, vocab_size=1 << 31)
    for token, position in zip(prompt, positions, strict=True):
        said, ours = _text(position, token), decode(token)
        # A byte of a longer character has no text of its own, and servers differ in the spaces they show.
        if said and ours.strip() and "\ufffd" not in said + ours and said.strip() != ours.strip():
            raise BadAnswer(f"id {token} is {said!r} to the server and {ours!r} to the student: another tokenizer")


def _text(position: Position, token: int) -> Any:
    return position[token].decoded_token if position and token in position else None
