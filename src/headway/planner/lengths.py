"""How long responses are: sampled tokens of all members of a group, drawn together.

Members of a group share a prompt, so their lengths are correlated; a group is whole only with its longest member.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Lengths(Protocol):
    """A distribution of response lengths."""

    def draw(self, rng: np.random.Generator, num_groups: int, group_size: int) -> NDArray[np.int64]:
        """Sampled tokens `[num_groups, group_size]`, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Every response has `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")

    def draw(self, rng: np.random.Generator, num_groups: int, group_size: int) -> NDArray[np.int64]:
        return np.full((num_groups, group_size), self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """length = mean · exp(σ z − σ²/2), z ~ N(0, 1), cut at `limit`; z of one group correlate by `correlation`.

    σ² = log(1 + cv²), cv = standard deviation ÷ mean. The cut lowers the mean; `truncated_fraction` hit it.
    """

    mean: float
    cv: float
    limit: int
    correlation: float = 0.5

    def __post_init__(self) -> None:
        is_finite = np.isfinite([self.mean, self.cv * self.cv]).all()
        if not (is_finite and self.mean >= 1 and self.cv >= 0 and self.limit >= 1 and 0 <= self.correlation <= 1):
            raise ValueError(f"needs finite mean ≥ 1, cv ≥ 0, limit ≥ 1 and correlation in [0, 1], got {self}")

    def draw(self, rng: np.random.Generator, num_groups: int, group_size: int) -> NDArray[np.int64]:
        sigma = np.sqrt(np.log1p(self.cv**2))
        shared = rng.standard_normal((num_groups, 1))
        own = rng.standard_normal((num_groups, group_size))
        z = np.sqrt(self.correlation) * shared + np.sqrt(1 - self.correlation) * own
        return np.clip(np.rint(self.mean * np.exp(sigma * z - sigma**2 / 2)), 1, self.limit).astype(np.int64)


class Empirical:
    """Draws whole groups with replacement from observed ones `[N, G]`, so that the correlation inside them stays.

    Another group size draws a group and then members of it, with replacement.
    """

    def __init__(self, observed: NDArray[np.int64]) -> None:
        if observed.ndim != 2 or not observed.size or observed.min() < 1:
            raise ValueError(f"observed lengths must be [groups, members] and at least 1, got shape {observed.shape}")
        self._observed = observed

    def draw(self, rng: np.random.Generator, num_groups: int, group_size: int) -> NDArray[np.int64]:
        groups = self._observed[rng.integers(len(self._observed), size=num_groups)]
        if group_size == groups.shape[1]:
            return groups
        members = rng.integers(groups.shape[1], size=(num_groups, group_size))
        return np.take_along_axis(groups, members, axis=1)
