"""Algorithms as named on the command line, `estr` or `estr:tau=1.0`, and whether recorded data can feed them."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.algorithms import ALGORITHMS, compute_advantages, find_algorithm
from headway.config import RunConfig
from headway.errors import HeadwayError, nearest
from headway.runtime.checks import try_out
from headway.training.batching import Rows
from headway.training.groups import require_whole_groups
from headway.types import Batch

WIDELY_USED = ("grpo", "dapo", "estr", "sat", "gspo", "m2po", "cispo", "asympo", "reinforce")


class MethodError(HeadwayError, ValueError):
    """An algorithm cannot be compared; the message names it and the mend."""


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm with its parameters.

    Example: `Method(label="estr:tau=1.0", algorithm="estr", params={"tau": 1.0})`
    """

    label: str
    algorithm: str
    params: Mapping[str, Any]

    @property
    def objective(self) -> tuple[str, str, int | None]:
        """(advantage, reduction, l_max): what its gradient would be on-policy is the policy gradient of these."""
        settings = find_algorithm(self.algorithm).resolve(self.params)
        return find_algorithm(self.algorithm).advantage, settings["reduction"], settings["l_max"]


def parse_methods(text: str | None, config: RunConfig) -> list[Method]:
    """Methods of a comma-separated list; None takes the run's own and those in wide use. Raises MethodError.

    The run's own algorithm has the run's parameters unless it is given others; every other one its defaults.
    """
    if text is None:
        names = [config.algorithm, *WIDELY_USED]
        if not config.engines.logprobs:
            names = [n for n in names if not {"behavior_logprobs", "behavior_entropy"} & find_algorithm(n).needs]
        if config.over_bound == "mask":
            names = [n for n in names if "whole_groups" not in find_algorithm(n).needs]
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise MethodError(f"no algorithm to compare; known: {', '.join(sorted(ALGORITHMS))}")
    return [_parse(name, config) for name in dict.fromkeys(names)]


def choose_baseline(methods: Sequence[Method], asked: str | None, config: RunConfig) -> str:
    """Label of the method that the others are held against: as asked, else the run's own, else the first."""
    labels = [method.label for method in methods]
    if asked is None:
        return config.algorithm if config.algorithm in labels else labels[0]
    if asked not in labels:
        raise MethodError(f"baseline {asked!r} is not among the algorithms compared; {nearest(asked, labels)}")
    return asked


def refuse_unfed(methods: Sequence[Method], batch: Batch, rows: Rows, *, where: str) -> None:
    """Raises MethodError naming the first method that needs what was not recorded, PartialGroup as training does."""
    for method in methods:
        needs = find_algorithm(method.algorithm).needs
        if "whole_groups" in needs:
            advantage = find_algorithm(method.algorithm).advantage
            advantages, _ = compute_advantages(advantage, rewards=rows.rewards, group=rows.group)
            require_whole_groups(method.algorithm, batch, rows, advantages)
        for name in ("behavior_logprobs", "behavior_entropy"):
            if name in needs and getattr(rows, name) is None:
                raise MethodError(
                    f"{method.label} needs {name}, which {where} did not record (engines.logprobs = false); "
                    "leave it out, or compare asympo, spo, naive, reinforce, which need none"
                )


def _parse(label: str, config: RunConfig) -> Method:
    name, *settings = label.split(":")
    if name not in ALGORITHMS:
        raise MethodError(f"unknown algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    if name == "ppo_ewma":
        raise MethodError("ppo_ewma needs averaged parameters, which no recorded batch holds; compare decoupled_ppo")
    if "whole_groups" in find_algorithm(name).needs and config.over_bound == "mask":
        raise MethodError(
            f'{name} needs whole groups, but the run has over_bound = "mask", which takes tokens out of them, and '
            'training would refuse it too; leave it out, or compare a run with over_bound = "wait" or "drop"'
        )
    params = dict(map(_setting, settings)) if settings else {}
    if name == config.algorithm:
        params = {**config.algorithm_params, **params}
    try:
        try_out(name, params)
    except ValueError as error:
        raise MethodError(str(error)) from error
    return Method(label, name, params)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise MethodError(f"parameters of an algorithm are written name:key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
