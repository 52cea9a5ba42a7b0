"""What a wrong setting is told: its key, what was expected there, what was given."""

import math
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "nothing"}
_BOUNDS = {Gt: ("gt", "greater than"), Ge: ("ge", "at least"), Lt: ("lt", "less than"), Le: ("le", "at most")}


def explain(error: ValidationError, section: type[BaseModel]) -> str:
    """One line a wrong key; a value that fits none of several kinds is one complaint, not one a kind."""
    lines: dict[str, None] = {}
    for found in error.errors():
        path, field = _setting(section, found["loc"])
        if field is None or found["type"] == "value_error":
            where = ".".join(str(part) for part in found["loc"])
            message = found["msg"].removeprefix("Value error, ")
            lines[f"{where}: {message}" if where else message] = None
        else:
            given = "it is missing" if found["type"] == "missing" else _given(found["input"])
            lines[f"{path}: expected {expected(field.annotation, field.metadata)} ({given})"] = None
    return "\n".join(lines)


def _given(value: Any) -> str:
    infinite = isinstance(value, float) and not math.isfinite(value)
    return f"given {value!r}, which is not finite" if infinite else f"given {value!r}"


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a key takes, in words.

    >>> expected(int, [Gt(0)])
    'a whole number greater than 0'
    >>> expected(Annotated[float, Gt(0), Le(1)] | Literal["law"])
    "a number greater than 0 and at most 1, or 'law'"
    >>> expected(list[Literal["wandb", "trackio"]])
    "a list, each 'wandb' or 'trackio'"
    """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return expected(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, UnionType):
        return ", or ".join(expected(kind) for kind in get_args(annotation) if kind is not NoneType)
    if get_origin(annotation) is Literal:
        *others, last = (repr(value) for value in get_args(annotation))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) in (list, tuple):
        return f"a list, each {expected(get_args(annotation)[0])}"
    bounds = " and ".join(_bounds(metadata))
    return f"{_PLAIN.get(annotation, 'a table')} {bounds}".rstrip()


def _bounds(metadata: Iterable[Any]) -> Iterable[str]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _bounds(one.metadata)
        elif type(one) in _BOUNDS:
            name, words = _BOUNDS[type(one)]
            yield f"{words} {getattr(one, name)}"


def _setting(section: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The dotted key that an error is about, and its field; no field where it is about the whole."""
    names: list[str] = []
    field: FieldInfo | None = None
    inner: Any = section
    for part in loc:
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)) or part not in inner.model_fields:
            break
        names.append(str(part))
        field = inner.model_fields[str(part)]
        inner = field.annotation
    return ".".join(names), field
