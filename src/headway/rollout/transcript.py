"""The tokens of one episode as they were served, with everything known about each."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from headway.errors import HeadwayError
from headway.types import (
    LOGPROB_SLACK,
    NO_VERSION,
    Bools,
    Completion,
    Experts,
    Floats,
    Ints,
    LogprobOrigin,
    Response,
    SideData,
)

_PER_TOKEN_SIDE = tuple(f.name for f in fields(SideData) if f.name != "routing")

_FILL = {"kept_mass": 1.0}
"""What tool tokens carry in side data, 0 where not named. Their mask is False, so nobody reads it."""


class BadCompletion(HeadwayError, ValueError):
    """An engine broke its contract: arrays of unlike length, impossible versions or log-probs."""


class Transcript:
    """Grows by completions and observations; `request()` is always the prompt and everything served since.

    `name` says which sample and engine this is, for errors.
    """

    def __init__(self, prompt_ids: Ints, name: str) -> None:
        self._name = name
        self._tokens: list[Ints] = [np.asarray(prompt_ids, np.int32)]
        self._chunks: list[Completion | int] = []  # what was sampled, or the length of an observation
        self.num_response = 0

    def request(self) -> Ints:
        """`[P + T]`: what the engine is asked to continue."""
        return np.concatenate(self._tokens)

    def add_sampled(self, completion: Completion, max_tokens: int) -> None:
        """Append what an engine returned for `request()`. Raises BadCompletion."""
        num_request = len(self._tokens[0]) + self.num_response
        check_completion(completion, num_request, max_tokens, self._name)
        if len(completion.token_ids):
            self._append(np.asarray(completion.token_ids, np.int32), completion)

    def add_observation(self, token_ids: Ints) -> None:
        """Append tool output, which no policy sampled."""
        if len(token_ids):
            self._append(np.asarray(token_ids, np.int32), len(token_ids))

    def response(self, *, reward: float, num_turns: int, truncated: bool, origin: LogprobOrigin | None) -> Response:
        """The finished record. Raises BadCompletion if only some completions carry log-probs or side data."""
        side = {name: self._column(name, lambda c, n=name: getattr(c.side, n)) for name in _PER_TOKEN_SIDE}
        logprobs = self._column("logprobs", lambda c: c.logprobs)
        return Response(
            token_ids=np.concatenate([np.empty(0, np.int32), *self._tokens[1:]]),
            mask=self._mask(),
            versions=self._versions(),
            reward=reward,
            behavior_logprobs=logprobs,
            behavior_entropy=self._column("entropy", lambda c: c.entropy),
            origin=None if logprobs is None else origin,
            side=replace(SideData(**side), routing=self._routing()),
            num_turns=num_turns,
            truncated=truncated,
        )

    def _append(self, token_ids: Ints, chunk: Completion | int) -> None:
        self._tokens.append(token_ids)
        self._chunks.append(chunk)
        self.num_response += len(token_ids)

    def _mask(self) -> Bools:
        parts = [np.full(len(t), not isinstance(c, int)) for t, c in zip(self._tokens[1:], self._chunks, strict=True)]
        return np.concatenate([np.empty(0, np.bool_), *parts])

    def _versions(self) -> Ints:
        versions = (np.full(c, NO_VERSION) if isinstance(c, int) else c.versions for c in self._chunks)
        return np.concatenate([np.empty(0), *versions]).astype(np.int32)

    def _column(self, name: str, read: Callable[[Completion], Any]) -> Any:
        """One per-token array over all chunks, tool tokens filled; None when no completion has it."""
        known = self._known(name, read)
        if not known:
            return None
        widths = {values.shape[1:] for values in known}
        if len(widths) > 1:
            raise BadCompletion(f"{self._name}: {name} changed its width within the episode: {sorted(widths)}")
        (width,), dtype, fill = widths, known[0].dtype, _FILL.get(name, 0)
        parts = (np.full((c, *width), fill) if isinstance(c, int) else read(c) for c in self._chunks)
        return np.concatenate([np.asarray(part, dtype) for part in parts])

    def _routing(self) -> Experts | None:
        """`[P + T, L, E]`: of each token the experts recorded first, in the pass that the next token was drawn from.

        A later request runs earlier tokens through the model once more, maybe under other weights; only the tokens
        that are new to it count. The last token of a completion has not entered the model yet: the next one has it.
        """
        known = self._known("routing", lambda c: c.side.routing)
        if not known:
            return None
        if len(shapes := {routing.shape[1:] for routing in known}) > 1:
            raise BadCompletion(f"{self._name}: routing changed its shape within the episode: {sorted(shapes)}")
        starts = [0, *(len(routing) - 1 for routing in known[:-1])]
        parts = [routing[start:-1] for start, routing in zip(starts, known, strict=True)]
        return np.concatenate([*parts, known[-1][-1:]])

    def _known(self, name: str, read: Callable[[Completion], Any]) -> list[Any]:
        """What the completions carry, from all of them or from none."""
        values = [read(c) for c in self._chunks if not isinstance(c, int)]
        known = [np.asarray(v) for v in values if v is not None]
        if known and len(known) < len(values):
            raise BadCompletion(f"{self._name}: only {len(known)} of {len(values)} completions carry {name}")
        return known


def check_completion(completion: Completion, num_request: int, max_tokens: int, name: str) -> None:
    """Hold a completion against the contract; `num_request` tokens were sent, `max_tokens` asked for.

    Raises BadCompletion, beginning with `name`.
    """
    num = len(completion.token_ids)
    if num > max_tokens:
        raise BadCompletion(f"{name}: {num} tokens came back, at most {max_tokens} were asked for")
    if num == 0 and completion.finish_reason != "interrupt":
        raise BadCompletion(f"{name}: no token came back, yet it finished by {completion.finish_reason!r}")
    per_token = {field: getattr(completion, field) for field in ("versions", "logprobs", "entropy")}
    per_token |= {field: getattr(completion.side, field) for field in _PER_TOKEN_SIDE}
    for field, values in per_token.items():
        if values is not None and len(values) != num:
            raise BadCompletion(f"{name}: {num} tokens but {len(values)} {field}")
    routing = completion.side.routing
    if num and routing is not None and len(routing) != num_request + num:
        raise BadCompletion(f"{name}: routing has {len(routing)} rows for {num_request} + {num} tokens")
    _check_versions(completion.versions, name)
    _check_logprobs(completion.logprobs, name)
    if completion.entropy is not None and not np.isfinite(completion.entropy).all():
        raise BadCompletion(f"{name}: entropy is not finite")


def _check_versions(versions: Ints, name: str) -> None:
    versions = np.asarray(versions)
    if (versions < 0).any():
        raise BadCompletion(f"{name}: a sampled token has version {versions.min()}; versions start at 0")
    if (versions[1:] < versions[:-1]).any():
        raise BadCompletion(f"{name}: versions go backwards within one completion: {versions}")


def _check_logprobs(logprobs: Floats | None, name: str) -> None:
    if logprobs is None:
        return
    wrong = ~(np.isfinite(logprobs) & (np.asarray(logprobs) <= LOGPROB_SLACK))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise BadCompletion(f"{name}: log-prob {logprobs[at]} of token {at} is not a finite number <= 0")
