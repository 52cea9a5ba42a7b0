"""A sleeping tool: stands in for a network call with a long tail."""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from headway.envs.splits import SPLITS
from headway.protocols import Environment, Episode, Turn
from headway.types import Ints, Prompt, Split


class WithLatency:
    """Any environment whose every turn takes longer by a log-normal time of mean `mean_s` seconds.

    delay = mean_s · exp(σ z − σ²/2), z ~ N(0, 1): with σ = 1 the median is 0.61 means and one in a hundred takes
    more than 6. The n-th attempt at a prompt always sleeps the same, whatever else is running.
    """

    def __init__(self, environment: Environment, *, mean_s: float = 0.2, sigma: float = 1.0, seed: int = 0) -> None:
        if not (math.isfinite(mean_s) and mean_s >= 0 and sigma >= 0):
            raise ValueError(f"latency needs mean_s >= 0 and sigma >= 0, got {mean_s} and {sigma}")
        self._environment = environment
        self._mean_s, self._sigma, self._seed = mean_s, sigma, seed
        self._attempts: Counter[tuple[Split, int]] = Counter()
        self.stop_token_ids = environment.stop_token_ids

    def size(self, split: Split) -> int:
        return self._environment.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._environment.prompt(split, index)

    def start(self, prompt: Prompt) -> "SlowEpisode":
        attempt = self._attempts[prompt.split, prompt.index]
        self._attempts[prompt.split, prompt.index] += 1
        rng = np.random.default_rng([self._seed, SPLITS.index(prompt.split), prompt.index, attempt])
        return SlowEpisode(self._environment.start(prompt), rng, self._mean_s, self._sigma)

    def observe(self, text: str, after_stop: bool) -> Ints:
        return self._environment.observe(text, after_stop)


@dataclass(frozen=True, slots=True)
class SlowEpisode:
    """Sleeps before each turn is judged."""

    episode: Episode
    rng: np.random.Generator
    mean_s: float
    sigma: float

    async def step(self, text: str) -> Turn:
        await asyncio.sleep(self.delay())
        return await self.episode.step(text)

    def delay(self) -> float:
        """Seconds of the next turn."""
        return self.mean_s * math.exp(self.sigma * self.rng.standard_normal() - self.sigma**2 / 2)
