"""What must hold before a run may start. Each refusal names the setting and the mend."""

from headway.algorithms import ALGORITHMS, find_algorithm
from headway.config import ConfigError, RunConfig
from headway.errors import nearest
from headway.runtime.task import Task


def check(config: RunConfig, task: Task) -> None:
    """Refuse a run that could not work, before any process starts. Raises ConfigError."""
    _check_algorithm(config)
    _check_lengths(config, task)


def _check_algorithm(config: RunConfig) -> None:
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {config.algorithm!r}; {nearest(config.algorithm, list(ALGORITHMS))}")
    try:
        needs = find_algorithm(config.algorithm).needs_for(config.algorithm_params)
    except ValueError as error:
        raise ConfigError(f"algorithm_params: {error}") from error
    if {"behavior_logprobs", "behavior_entropy"} & needs and not config.engines.logprobs:
        raise ConfigError(
            f"algorithm {config.algorithm!r} needs log-probs or entropy of the policy that sampled, but "
            "engines.logprobs = false; set it to true, or choose asympo or spo, which need none"
        )
    if "whole_groups" in needs and config.over_bound == "mask":
        raise ConfigError(
            f"algorithm {config.algorithm!r} needs whole groups (its gradient sums to zero only over all members), "
            'but over_bound = "mask" takes tokens out of them; set over_bound to "wait" or "drop"'
        )


def _check_lengths(config: RunConfig, task: Task) -> None:
    if task.environment.size("train") < 1:
        raise ConfigError(f"task {config.task.name!r} has no training prompts")
    longest = max(len(task.environment.prompt("train", index).token_ids) for index in _sample(task))
    needed = longest + config.sampling.max_response_tokens
    if needed > config.engines.max_length:
        raise ConfigError(
            f"a prompt of {longest} tokens and sampling.max_response_tokens = {config.sampling.max_response_tokens} "
            f"do not fit engines.max_length = {config.engines.max_length}; set it to at least {needed}"
        )


def _sample(task: Task) -> range:
    """Up to 64 prompts, evenly spread: enough to catch a wrong limit without reading a large data set."""
    size = task.environment.size("train")
    return range(0, size, max(1, size // 64))
