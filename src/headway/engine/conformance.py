"""Does an engine hold the weights it says it holds? Fixed prompts after updates, against the learner's answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headway.errors import HeadwayError
from headway.protocols import Engine, EngineDied
from headway.types import Floats, Ints, Sampling

TOLERANCE = {"float32": 0.005, "bfloat16": 0.05, "float16": 0.02}
"""Largest mean |δ|, nats, by what the engine computes in; rounding alone stays an order of magnitude below."""


class EngineDisagrees(HeadwayError, RuntimeError):
    """An engine's log-probs are not the learner's; what it samples would be trained against a wrong ratio."""


class Conformance:
    """Compares next-token log-probs of fixed prompts: engine after an update, learner at the moment of publishing.

    `score()`: the learner's log-probs `[num_prompts, V]` now. `every`: 0 checks only the first version it is told of.
    δ is taken over the `num_top` tokens that the engine holds most likely. Every kind of fault that leaves old or
    foreign weights in an engine shows here: a tied head that is not refreshed, a chunk that was lost, another model.
    """

    def __init__(
        self,
        prompts: Sequence[Ints],
        *,
        score: Callable[[], Floats],
        every: int,
        tolerance: float,
        num_top: int = 8,
    ) -> None:
        self._prompts, self._score = prompts, score
        self._every, self._tolerance, self._num_top = every, tolerance, num_top
        self._expected: tuple[int, Floats] | None = None
        self._is_first = True
        self._checked, self._deltas = -1, dict[str, float]()
        """The version last checked, and what was found of each engine that holds it."""
        self.last_delta: float | None = None
        """Mean |δ| of the worst engine that holds the version last checked."""

    def remember(self, version: int) -> None:
        """Note what the learner says now, if `version` is due. Call it between two steps, in the learner's thread."""
        if self._is_first or (self._every and version % self._every == 0):
            self._is_first = False
            self._expected = version, self._score()

    async def check(self, version: int, engines: Mapping[str, Engine]) -> None:
        """Ask engines that hold `version` and keep it meanwhile, if it is due.

        Raises EngineDisagrees naming the engine and the mend.
        """
        if self._expected is None or self._expected[0] != version:
            return
        expected = self._expected[1]
        deltas = await asyncio.gather(*(self._delta(engine, expected) for engine in engines.values()))
        known = {name: delta for name, delta in zip(engines, deltas, strict=True) if delta is not None}
        if not known:
            return
        self._deltas = (self._deltas if version == self._checked else {}) | known
        self._checked = version
        self.last_delta = float(np.max(list(self._deltas.values())))  # not `max`, which may pass over NaN
        worst = list(known)[int(np.argmax(list(known.values())))]
        # Not `>`: a delta that is NaN is no agreement.
        if not known[worst] <= self._tolerance:
            raise EngineDisagrees(
                f"{worst} says it holds version {version}, but its log-probs of {len(self._prompts)} fixed prompts "
                f"differ from the learner's by {known[worst]:.3g} nats on average, more than {self._tolerance:g}. It "
                "serves other weights (a tied head that an update does not reach, a stale cache) or computes in "
                "another dtype: see docs/engines.md, or raise engines.conformance_tolerance if this is rounding"
            )

    async def _delta(self, engine: Engine, expected: Floats) -> float | None:
        """Mean |δ| of one engine; None when it died, which is the supervisor's matter."""
        top = min(self._num_top, expected.shape[1])
        sampling = Sampling(max_tokens=1, num_top=top, priority=-1)
        try:
            answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in self._prompts))
        except EngineDied:
            return None
        answered = [(row, a.side) for row, a in zip(expected, answers, strict=True) if len(a.token_ids)]
        deltas = [np.abs(side.top_logprobs - row[side.top_ids]) for row, side in answered]
        return float(np.mean(np.concatenate(deltas))) if deltas else None
