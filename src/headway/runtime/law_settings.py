"""Which settings a fitted law belongs to, and which runs it may be fitted to."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.config import RunConfig
from headway.study.design import flatten

_MAY_DIFFER = (
    *("max_staleness", "exact_lag", "num_steps", "seed"),  # what a sweep varies
    # Who measures, keeps, waits and carries, and what engines and learner run on: none of it changes an update.
    *(
        "evaluation",
        "checkpoint",
        "report",
        "record",
        "wait_limit_s",
        "runtime",
        "ray",
        "weights",
        "rollout",
        "learner",
    ),
)
_NO_PART_OF_A_LAW = {
    # Schedule and guard: `unfit` refuses those under which a run does not train at its rate.
    "optimizer": ("lr", "law", "schedule"),
    "guard": ("action", "window", "cosine", "ess", "k3", "budget"),
    "engines": (
        *("num_engines", "num_slots", "max_length", "num_threads", "device", "max_restarts", "update_patience_s"),
        *("stall_s", "update_timeout_s", "start_timeout_s", "python", "url", "api_key_env", "server_args"),
        *("conformance_every", "conformance_tolerance"),
    ),
    "distill": (
        *("num_threads", "device", "batch_tokens", "served_model", "tokenizer", "latency_s", "timeout_s"),
        "max_failures",
    ),
    "task": ("latency_s",),
}


def belongs_to(config: RunConfig) -> dict[str, Any]:
    """The settings that a law's constants depend on: all but what a sweep varies and what only takes time.

    Anything not named above counts, so that a setting added later is compared until someone says that it need not be.
    """
    values = config.model_dump(mode="json", exclude=set(_MAY_DIFFER))
    for section, names in _NO_PART_OF_A_LAW.items():
        values[section] = {key: value for key, value in values[section].items() if key not in names}
    return values


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two of `belongs_to` differ."""
    mine, other = flatten(ours), flatten(theirs)
    return sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))


def differing_among(configs: Sequence[RunConfig]) -> list[str]:
    """Dotted keys in which any two of these configs differ, of those that a law belongs to."""
    first, *others = [belongs_to(config) for config in configs]
    distinct = {json.dumps(other, sort_keys=True): other for other in others}
    return sorted({key for other in distinct.values() for key in differing(first, other)})


def unfit(config: RunConfig) -> str | None:
    """Why no law can be fitted to such a run; None where one can."""
    if config.max_staleness and not config.exact_lag:
        return (
            "trained under a bound, on data that may be much younger: a law needs exact_lag = true, which "
            "`headway law sweep` sets"
        )
    if config.optimizer.schedule != "constant":
        return (
            f'trained at a rate that falls (optimizer.schedule = "{config.optimizer.schedule}"): a law needs '
            '"constant", which `headway law sweep` sets'
        )
    if config.guard.action.startswith("lower"):
        return (
            f'had a guard that acts (guard.action = "{config.guard.action}"), so that rate or lag may not be what the '
            'config says: a law needs "warn" or "off", which `headway law sweep` sets'
        )
    return None
