"""A teacher behind an OpenAI-compatible server that returns prompt log-probs (vLLM: `/v1/completions`).

Such a server reports the tokens of the prompt and the most likely ids beside them, never the log-prob of a chosen id:
it can feed the cache `teacher_topk`, and Monte Carlo of one draw, the token itself.
"""

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from headway.protocols import RequestRefused, TeacherLost
from headway.types import Ints, TeacherScores

MOST_CONNECTIONS = 32
LONGEST_PAUSE_S = 30.0
MOST_BYTES = 256 << 20

_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_THIS_REQUEST = frozenset({400, 413, 422})


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
        self._num_pending = 0
        self._last_error = ""
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> str:
        trouble = f"; its last answer: {self._last_error}" if self._last_error else ""
        return f"the teacher at {self._url} ({self._num_pending} requests pending{trouble})"

    def ask(self, token_ids: Sequence[int], num_top: int) -> list[Mapping[str, Any] | None]:
        """One attempt, blocking: the prompt's log-probs, an entry a token. Raises OSError, ValueError."""
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            # The token itself comes besides; 0 would be taken for "none" by some versions.
            "prompt_logprobs": max(1, num_top),
        }
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            answer = json.loads(response.read(MOST_BYTES))
        positions = prompt_logprobs(answer)
        if len(positions) != len(token_ids):
            raise ValueError(f"{len(positions)} prompt log-probs came back for {len(token_ids)} tokens")
        return positions

    async def _persist(self, token_ids: Ints, num_scored: int, num_top: int) -> TeacherScores:
        loop = asyncio.get_running_loop()
        for attempt in range(self._max_failures):
            try:
                positions = await loop.run_in_executor(self._threads, self.ask, token_ids.tolist(), num_top)
                scores = read_positions(positions[-num_scored:], token_ids[-num_scored:], num_top, self._vocab_size)
            except (OSError, ValueError) as error:  # HTTP errors are OSErrors, and so are time-outs
                self._judge(error, attempt)
            else:
                self._last_error = ""
                return scores
            await asyncio.sleep(min(LONGEST_PAUSE_S, self._first_pause_s * 2**attempt))
        raise TeacherLost(
            f"the teacher at {self._url} failed {self._max_failures} times in a row ({self._last_error}); "
            "start it again, then `headway resume` the run"
        )

    def _judge(self, error: Exception, attempt: int) -> None:
        """Count a failure that another attempt may mend; raise for one that it cannot."""
        reason = describe_error(error)
        if isinstance(error, urllib.error.HTTPError) and error.code not in _TRY_AGAIN:
            if error.code in _THIS_REQUEST:
                raise RequestRefused(f"the teacher at {self._url} refused: {reason}") from error
            raise TeacherLost(f"the teacher at {self._url} answers {reason}; check its URL, key and model") from error
        self.num_retries += 1
        if not self._last_error:
            self._say(f"the teacher at {self._url} failed ({reason}); asking again")
        self._last_error = reason


def prompt_logprobs(answer: Any) -> list[Mapping[str, Any] | None]:
    """The `prompt_logprobs` of an answer's one choice. Raises ValueError when there are none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    positions = choices[0].get("prompt_logprobs") if choices and isinstance(choices[0], dict) else None
    if not isinstance(positions, list):
        raise ValueError("the answer holds no prompt_logprobs; the server must support them (vLLM does)")
    return positions


def read_positions(
    positions: Sequence[Mapping[str, Any] | None], token_ids: Ints, num_top: int, vocab_size: int
) -> TeacherScores:
    """Log-probs of the tokens, and the `num_top` most likely ids below `vocab_size`. Raises ValueError if one lacks."""
    own = np.empty((len(token_ids), 1), np.float32)
    top_ids = np.empty((len(token_ids), num_top), np.int32)
    top = np.empty((len(token_ids), num_top), np.float32)
    for t, (position, token) in enumerate(zip(positions, token_ids.tolist(), strict=True)):
        found = {int(id): float(entry["logprob"]) for id, entry in (position or {}).items()}
        if token not in found or not all(map(math.isfinite, found.values())):
            raise ValueError(f"the teacher gave no log-prob of token {token} at position {t} of the response")
        if sum(id < vocab_size for id in found) < num_top:
            raise ValueError(f"the teacher gave {len(found)} log-probs a position, {num_top} were asked for")
        own[t] = found[token]
        likely = sorted((id for id in found if id < vocab_size), key=lambda id: (-found[id], id))[:num_top]
        top_ids[t], top[t] = likely, [found[id] for id in likely]
    if not num_top:
        return TeacherScores(own)
    return TeacherScores(own, top_ids, top)


def check_server(teacher: HttpTeacher, prompt: Sequence[int], num_top: int, *, decode: Callable[[int], str]) -> None:
    """Ask about one prompt: does the server answer, and do its ids mean the student's tokens? Raises ValueError."""
    try:
        positions = teacher.ask(prompt, num_top)
    except OSError as error:
        raise ValueError(f"no answer from the server: {describe_error(error)}") from error
    read_positions(positions[1:], np.array(prompt[1:], np.int32), num_top, 1 << 31)
    for token, position in zip(prompt, positions, strict=True):
        said, ours = ((position or {}).get(str(token)) or {}).get("decoded_token"), decode(token)
        # A byte of a longer character has no text of its own, and servers differ in the spaces they show.
        if said and ours.strip() and "\ufffd" not in said + ours and said.strip() != ours.strip():
            raise ValueError(f"id {token} is {said!r} to the server and {ours!r} to the student: another tokenizer")


def describe_error(error: Exception) -> str:
    """An error with what the server said of it."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
    return f"{type(error).__name__}: {error}"
