"""What a simulation found."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One simulated optimizer step."""

    step: int
    at_s: float
    """Simulated seconds when it ended, publish included."""
    num_tokens: int
    """Sampled tokens that trained."""
    waited_s: float
    """Seconds the learner waited for groups or a sync."""
    engine_busy_s: float
    """Of all engines since the start."""
    sampled_tokens: int
    """By all engines since the start."""
    token_staleness: Counter[int]
    sample_staleness: Counter[int]
    num_masked_tokens: int
    lengths_sum: int
    """Sampled tokens of its responses."""
    decode_steps: float
    """Of all engines since the start."""
    refills: int
    """Passes in which requests joined, of all engines since the start."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """Groups at the end of a simulation; issued = trained + dropped + generating + ready."""

    issued: int
    trained: int
    dropped: int
    generating: int
    ready: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rates and shares of the steady state, after the first steps are left out."""

    step_s: float
    samples_per_s: float
    """Responses trained."""
    tokens_per_s: float
    """Sampled tokens trained."""
    sampled_tokens_per_s: float
    """Tokens the engines sampled, whatever became of them."""
    learner_idle: float
    engine_idle: float
    staleness_token_mean: float
    staleness_sample_mean: float
    token_staleness: dict[int, float]
    """Staleness to share of trained tokens."""
    sample_staleness: dict[int, float]
    """Staleness of the oldest token to share of trained samples."""
    dropped_fraction: float
    """Groups dropped ÷ groups that left."""
    masked_fraction: float
    """Tokens masked ÷ tokens of trained samples."""
    mean_length_issued: float
    mean_length_trained: float
    mean_active: float
    """Sequences that an engine decodes together."""
    refills_per_step: float
    """Passes in which requests joined the engines, for each optimizer step."""
    num_steps: int
    """Simulated steps that these numbers average over."""
    cohort: int
    """Engines that one simulated engine stands for."""
    accounts: Accounts
    """Of the groups that were simulated."""

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.step_s

    @property
    def length_bias(self) -> float:
        """Mean trained length ÷ mean issued length; below 1 long answers are lost."""
        return self.mean_length_trained / self.mean_length_issued

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        facts = asdict(self)
        for name in ("token_staleness", "sample_staleness"):
            facts[name] = {str(age): share for age, share in facts[name].items()}
        return {**facts, "steps_per_hour": self.steps_per_hour, "length_bias": self.length_bias}


@dataclass(slots=True)
class Tally:
    """What a simulation counts while it runs."""

    steps: list[StepRecord] = field(default_factory=list)
    issued: int = 0
    dropped: list[int] = field(default_factory=list)
    """The step during which each dropped group left."""
    issued_tokens: int = 0


def summarize(tally: Tally, accounts: Accounts, *, setup: Setup, simulated: Setup, warmup: int) -> Forecast:
    """Averages from the end of step `warmup` − 1 to the last one, scaled from what was simulated to the setup."""
    before, steps = tally.steps[warmup - 1], tally.steps[warmup:]
    last = steps[-1]
    seconds = last.at_s - before.at_s
    batch_size, group_size = simulated.batch_size, simulated.group_size
    scale = setup.batch_size / batch_size
    num_samples = batch_size * len(steps)
    ages = sum((s.token_staleness for s in steps), Counter[int]())
    sample_ages = sum((s.sample_staleness for s in steps), Counter[int]())
    num_tokens, num_masked = sum(ages.values()), sum(s.num_masked_tokens for s in steps)
    num_dropped = sum(step >= warmup for step in tally.dropped)
    return Forecast(
        step_s=seconds / len(steps),
        samples_per_s=scale * num_samples / seconds,
        tokens_per_s=scale * num_tokens / seconds,
        sampled_tokens_per_s=scale * (last.sampled_tokens - before.sampled_tokens) / seconds,
        learner_idle=sum(s.waited_s for s in steps) / seconds,
        engine_idle=1 - (last.engine_busy_s - before.engine_busy_s) / (seconds * simulated.num_engines),
        staleness_token_mean=_mean(ages),
        staleness_sample_mean=_mean(sample_ages),
        token_staleness=_shares(ages),
        sample_staleness=_shares(sample_ages),
        dropped_fraction=num_dropped * group_size / (num_dropped * group_size + num_samples),
        masked_fraction=num_masked / max(1, num_tokens + num_masked),
        mean_length_issued=tally.issued_tokens / (tally.issued * group_size),
        mean_length_trained=sum(s.lengths_sum for s in steps) / num_samples,
        mean_active=(last.sampled_tokens - before.sampled_tokens) / max(last.decode_steps - before.decode_steps, 1e-9),
        refills_per_step=scale * (last.refills - before.refills) / len(steps),
        num_steps=len(steps),
        cohort=max(1, round(setup.num_engines / simulated.num_engines)),
        accounts=accounts,
    )


def count_ages(
    responses: Iterable[Sequence[tuple[int, int]]], *, version: int, max_staleness: int
) -> tuple[Counter[int], Counter[int], int]:
    """Token and sample ages of a step's responses, each given as (version, tokens), and the tokens beyond the bound."""
    ages, sample_ages, num_masked = Counter[int](), Counter[int](), 0
    for counts in responses:
        kept = [(v, n) for v, n in counts if version - v <= max_staleness]
        num_masked += sum(n for _, n in counts) - sum(n for _, n in kept)
        if kept:
            sample_ages[version - kept[0][0]] += 1
        for v, n in kept:
            ages[version - v] += n
    return ages, sample_ages, num_masked


def _mean(ages: Counter[int]) -> float:
    return sum(age * n for age, n in ages.items()) / max(1, sum(ages.values()))


def _shares(ages: Counter[int]) -> dict[int, float]:
    total = max(1, sum(ages.values()))
    return {age: ages[age] / total for age in sorted(ages)}
