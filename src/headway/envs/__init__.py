"""Tasks by name: where prompts come from, and who judges the answers."""

import inspect
from importlib import import_module
from typing import Any

from headway.envs.latency import WithLatency
from headway.envs.turns import SingleTurn, Turn
from headway.errors import nearest
from headway.protocols import Environment

__all__ = ["ENVIRONMENTS", "SingleTurn", "Turn", "WithLatency", "find_environment", "make_environment"]

ENVIRONMENTS = {
    "addition": "headway.envs.addition:Addition",
    "calculator": "headway.envs.calculator:Calculator",
    "gsm8k": "headway.envs.gsm8k:Gsm8k",
}
"""Besides these, `reasoning_gym:<task>` and your own `package.module:Class`."""

_REASONING_GYM = "reasoning_gym"


def make_environment(name: str, *, tokenizer: Any, **options: Any) -> Environment:
    """The environment `name`, built as `Class(tokenizer, **options)`.

    Raises ValueError with the nearest name for an unknown environment or option, ImportError for a missing extra.
    """
    kind, options = find_environment(name, options)
    return kind(tokenizer, **options)


def find_environment(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the environment `name` and its keyword arguments. Raises as `make_environment`."""
    where, _, task = name.partition(":")
    if where == _REASONING_GYM:
        name, options = "headway.envs.reasoning_gym:ReasoningGym", {"task": task, **options}
    elif name in ENVIRONMENTS:
        name = ENVIRONMENTS[name]
    elif not task:
        raise _unknown(name)
    kind = _load(name)
    _check_options(kind, options)
    return kind, options


def _check_options(kind: Any, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} of {kind.__name__}; {nearest(option, known)}")


def _load(path: str) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the environment itself lacks is its own matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _unknown(path) from error
    if not hasattr(module, class_name):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"module {module_name} has no {class_name!r}; {nearest(class_name, classes)}")
    return getattr(module, class_name)


def _unknown(name: str) -> ValueError:
    known = [*ENVIRONMENTS, f"{_REASONING_GYM}:<task>", "package.module:Class (importable)"]
    return ValueError(f"unknown environment {name!r}; {nearest(name, known)}")
