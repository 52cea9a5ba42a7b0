"""What makes a run the one it is: settings that may not change between two commands."""

from collections.abc import Mapping
from typing import Any

from headway.algorithms import ALGORITHMS
from headway.config import RunConfig
from headway.config_sections import SERVERS

_IDENTITY = (
    *("seed", "batch_size", "group_size", "num_steps", "over_bound", "task", "model", "sampling"),
    *("algorithm", "algorithm_params", "optimizer", "behavior_entropy", "behavior_entropy_top", "guard"),
    *("exact_lag", "proximal", "ewma", "routing_replay"),
)
"""Settings that say what the stored responses are and what a step makes of them. With others a step that is trained
again would give other parameters under the same version number, and a replay another run."""

_DISTILL_IDENTITY = (
    *("teacher", "served_model", "method", "params", "num_draws", "top_k", "temperature", "teacher_accuracy"),
    *("weight", "reward_weight"),
)

_SECTIONS = ("distill", "learner")
"""Of which only some settings count."""


def identity(config: RunConfig) -> dict[str, Any]:
    """What `identity.json` keeps, as plain data."""
    values = config.model_dump(mode="json")
    distill = {key: values["distill"][key] for key in _DISTILL_IDENTITY}
    learner = {"micro_batch_tokens": config.learner.micro_batch_tokens} if _sees_micro_batches(config) else {}
    return {key: values[key] for key in (*_IDENTITY, "max_staleness")} | {"distill": distill, "learner": learner}


def objection_to(config: RunConfig, stored: Mapping[str, Any]) -> str:
    """Why this config belongs to another run than the one that kept `stored`; empty when it does not."""
    if damaged := [name for name in _SECTIONS if not isinstance(stored.get(name, {}), dict)]:
        return f"identity.json is damaged ({damaged[0]} is no table): it says how the run was started; restore it"
    now, before = _dotted(identity(config)), _dotted(stored)
    for key, value in now.items():
        # Nothing is known of a setting that did not exist when the run was started: an edit of it goes unseen.
        if key != "max_staleness" and not _is_same(key, value, was := before.get(key, value)):
            return (
                f"config.toml has {key} = {value}, but the run was started with {was}; set it back, "
                "or start a new run from its newest checkpoint (model.path)"
            )
    if now["max_staleness"] < before["max_staleness"]:
        return (
            f"max_staleness was {before['max_staleness']} and can only be raised: responses in flight may be that old"
        )
    return ""


def _sees_micro_batches(config: RunConfig) -> bool:
    """Whether the loss takes its quantile from each forward pass, so that their size is part of it."""
    algorithm = ALGORITHMS.get(config.algorithm)
    defaults = algorithm.defaults if algorithm is not None else {}
    return {**defaults, **config.algorithm_params}.get("scope") == "micro_batch"


def _dotted(identity: Mapping[str, Any]) -> dict[str, Any]:
    """With the settings of a section under keys of their own: each may be younger than the run."""
    rest = {key: value for key, value in identity.items() if key not in _SECTIONS}
    return rest | {f"{name}.{key}": value for name in _SECTIONS for key, value in identity.get(name, {}).items()}


def _is_same(key: str, now: Any, before: Any) -> bool:
    """A server may come back at another address: who teaches there is `distill.served_model`."""
    is_server = key == "distill.teacher" and str(now).startswith(SERVERS) and str(before).startswith(SERVERS)
    return is_server or now == before
