"""The planner's libraries come with an extra of their own."""

from importlib.util import find_spec

from headway.errors import HeadwayError


class ExtraMissing(HeadwayError, ImportError):
    """A command was asked for whose libraries are not installed."""


def require_extra(extra: str, *libraries: str) -> None:
    """Raises ExtraMissing with the command that installs what is missing."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise ExtraMissing(f"this needs {' and '.join(missing)}: pip install 'headway[{extra}]'")
