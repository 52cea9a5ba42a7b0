"""What a run works on: the tokenizer, the environment and the model it starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.config import ConfigError, RunConfig
from headway.envs import make_environment
from headway.models.loading import load_tokenizer
from headway.models.tiny import character_tokenizer
from headway.protocols import Environment

TINY = "tiny:"


@dataclass(frozen=True, slots=True)
class Task:
    """Everything about the task that the rest of the wiring needs."""

    environment: Environment
    tokenizer: Any
    model: str
    """Directory or hub id of the first weights."""
    decode: Callable[[Sequence[int]], str]
    """Token ids to text without special tokens."""


def open_task(config: RunConfig, *, say: Callable[[str], None]) -> Task:
    """Load the tokenizer, build the environment, find (or cold-start) the model. Raises ConfigError."""
    tiny = config.model.path.startswith(TINY)
    tokenizer = character_tokenizer() if tiny else _tokenizer(config.model.path)
    environment = open_environment(config, tokenizer)
    model = _cold_started(config, environment, say) if tiny else config.model.path
    return Task(environment, tokenizer, model, partial(_decode, tokenizer))


def open_environment(config: RunConfig, tokenizer: Any) -> Environment:
    """The environment of the config. Raises ConfigError with the nearest name, or the package that is missing."""
    task = config.task
    try:
        return make_environment(task.name, tokenizer=tokenizer, latency_s=task.latency_s, **task.options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"task {task.name!r}: {error}") from error


def _tokenizer(path: str) -> Any:
    try:
        return load_tokenizer(path)
    except FileNotFoundError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)
