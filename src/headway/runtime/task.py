"""What a run works on: the tokenizer, the environment and the model it starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from headway.config import ConfigError, RunConfig
from headway.envs import find_environment, make_environment
from headway.errors import nearest
from headway.models.cold_start import LEARNING_RATES, ColdStart, ColdStartFailed, Examples, cached_cold_start
from headway.models.loading import load_tokenizer, locate
from headway.models.tiny import TINY_SIZES, character_tokenizer
from headway.protocols import Environment, SupervisedEnvironment
from headway.types import Split

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
    teacher: str = ""
    """Directory, hub id or URL of the teacher; empty without one."""


def open_task(config: RunConfig, *, say: Callable[[str], None]) -> Task:
    """Load the tokenizer, build the environment, find (or cold-start) model and teacher. Raises ConfigError."""
    model, teacher = config.model.path, config.distill.teacher
    tokenizer = character_tokenizer() if model.startswith(TINY) else _tokenizer(model)
    environment = open_environment(config, tokenizer)
    # Once for both: encoding all three-digit sums takes seconds.
    examples = cache(environment.examples) if isinstance(environment, SupervisedEnvironment) else None
    if teacher.startswith(TINY):
        teacher = _cold_started(config, examples, teacher, config.distill.teacher_accuracy, "distill.teacher", say)
    if model.startswith(TINY):
        model = _cold_started(config, examples, model, config.model.cold_start_accuracy, "model.path", say)
    return Task(environment, tokenizer, model, partial(decode, tokenizer), teacher)


def check_models(config: RunConfig) -> None:
    """Refuse a model or teacher that cannot be there, before anything is loaded or written. Raises ConfigError."""
    _check_model("model.path", config.model.path, "")
    if config.distill.teacher and not config.distill.is_remote:
        _check_model(
            "distill.teacher", config.distill.teacher, ", or a server's URL, which begins with http:// or https://"
        )


def _check_model(key: str, name: str, other: str) -> None:
    tiny = [TINY + size for size in TINY_SIZES]
    if name.startswith(TINY):
        if name not in tiny:
            raise ConfigError(f"{key} = {name!r}: {nearest(name, tiny)}")
        return
    try:
        locate(name)
    except FileNotFoundError as error:
        hint = f"; {nearest(name, tiny)}" if name.startswith("tiny") else ""
        raise ConfigError(f"{key}: {error}{other}{hint}") from error


def check_environment(config: RunConfig) -> None:
    """Refuse an unknown environment or option, before anything is loaded or written. Raises ConfigError."""
    try:
        find_environment(config.task.name, config.task.options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"task {config.task.name!r}: {error}") from error


def open_environment(config: RunConfig, tokenizer: Any) -> Environment:
    """The environment of the config, without its latency. Raises ConfigError naming the mend."""
    task = config.task
    try:
        return make_environment(task.name, tokenizer=tokenizer, **task.options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"task {task.name!r}: {error}") from error


def _tokenizer(path: str) -> Any:
    try:
        return load_tokenizer(path)
    except FileNotFoundError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Token ids to text without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def longest_prompt(environment: Environment, split: Split) -> int:
    """Tokens of the longest among up to 64 prompts, evenly spread: enough to catch a wrong limit, and soon read.

    One that raises is left to the run, which drops its group. Raises ConfigError when all of them do.
    """
    size = environment.size(split)
    lengths, failure = [], None
    for index in range(0, size, max(1, size // 64)):
        try:
            lengths.append(len(environment.prompt(split, index).token_ids))
        except Exception as error:  # whatever a task raises is its own matter
            failure = error
    if not lengths:
        raise ConfigError(f"no {split} prompt could be made: {type(failure).__name__}: {failure}") from failure
    return max(lengths)


def _cold_started(
    config: RunConfig,
    examples: Callable[[Split], Examples] | None,
    path: str,
    accuracy: float,
    key: str,
    say: Callable[[str], None],
) -> str:
    """A tiny model trained on right answers to an accuracy; `key` is the setting that asks for it."""
    size = path.removeprefix(TINY)
    if size not in TINY_SIZES:
        raise ConfigError(f"{key} = {path!r}: {nearest(size, list(TINY_SIZES))}")
    if examples is None:
        raise ConfigError(
            f"{key} = {path!r} is cold-started on right answers, which task {config.task.name!r} "
            'does not give; name a trained model, or use task "addition"'
        )
    settings = ColdStart(size=size, seed=config.seed, accuracy=accuracy, learning_rate=LEARNING_RATES[size])
    # Nothing generates yet, so the engines' share of the cores is free.
    torch.set_num_threads(config.learner.num_threads + config.engines.num_engines * config.engines.num_threads)
    try:
        return str(cached_cold_start(settings, examples("train"), examples("validation"), say=say))
    except ColdStartFailed as error:
        raise ConfigError(str(error)) from error
