"""The best split of devices between engines and learner, and the smallest bound that is fast enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from headway.planner.forecast import Forecast
from headway.planner.setup import Setup
from headway.planner.simulate import simulate

Measure = Callable[[Setup], Forecast]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the devices."""

    name: str
    setup: Setup
    forecast: Forecast


def split(setup: Setup, num_engines: int, *, num_devices: int, devices_per_engine: int) -> Setup:
    """`num_engines` engines; the learner has the other devices."""
    return replace(setup, num_engines=num_engines, learner_devices=num_devices - num_engines * devices_per_engine)


def best_split(
    setup: Setup,
    *,
    num_devices: int,
    devices_per_engine: int = 1,
    engines: tuple[int, int] | None = None,
    measure: Measure | None = None,
) -> Setup:
    """The split with the highest throughput at the bound of `setup`, with a number of engines within `engines`.

    Throughput is the lesser of what engines can sample, which rises with their number, and what the learner can
    train, which falls; so it has one peak, and a golden-section search over the number of engines finds it.
    Raises ValueError when there are not devices for one engine and the learner.
    """
    measure = measure or _glance
    most = (num_devices - 1) // devices_per_engine
    if most < 1:
        raise ValueError(f"{num_devices} devices leave none for the learner beside an engine of {devices_per_engine}")
    low, high = engines or (1, most)
    shape = partial(split, setup, num_devices=num_devices, devices_per_engine=devices_per_engine)
    found = cache(lambda num_engines: measure(shape(num_engines)).samples_per_s)
    return shape(golden_maximum(found, max(1, low), min(most, high)))


def _glance(setup: Setup) -> Forecast:
    """A shorter simulation of a smaller cohort than a forecast's own: a search asks for dozens."""
    steps, warmup = max(8, 6_000 // setup.batch_size), setup.max_staleness + 3
    return simulate(setup, num_steps=steps, warmup=warmup, cohort_responses=512)


def golden_maximum(value: Callable[[int], float], low: int, high: int) -> int:
    """The integer in [low, high] where a function with one peak is greatest."""
    ratio = (5**0.5 - 1) / 2
    while high - low > 3:
        left = high - max(1, round(ratio * (high - low)))
        right = low + max(1, round(ratio * (high - low)))
        if left >= right:
            left, right = (low + high) // 2, (low + high) // 2 + 1
        if value(left) < value(right):
            low = left
        else:
            high = right
    return max(range(low, high + 1), key=value)


def best_bounds(
    setup: Setup, *, num_devices: int, devices_per_engine: int, bounds: Sequence[int], measure: Measure = simulate
) -> list[Option]:
    """The best split for each bound, in order of the bounds; found near that of the next larger one."""
    options: dict[int, Option] = {}
    engines = None
    for bound in sorted(bounds, reverse=True):
        best = best_split(
            replace(setup, max_staleness=bound),
            num_devices=num_devices,
            devices_per_engine=devices_per_engine,
            engines=engines,
        )
        reach = max(2, round(0.3 * best.num_engines))
        engines = (best.num_engines - reach, best.num_engines + reach)
        options[bound] = Option(f"best at bound {bound}", best, measure(best))
    return [options[bound] for bound in bounds]


def recommend(options: Sequence[Option], *, tolerance: float = 0.02) -> Option:
    """The smallest bound whose throughput is within `tolerance` of the best: staleness that buys nothing is waste."""
    best = max(option.forecast.samples_per_s for option in options)
    enough = [option for option in options if option.forecast.samples_per_s >= (1 - tolerance) * best]
    return min(enough, key=lambda option: option.setup.max_staleness)
