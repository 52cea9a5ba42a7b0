"""How Headway refuses: errors that are the user's to mend, and hints for names nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadwayError(Exception):
    """The user can mend this; the command line shows its message without a traceback."""


class AccessRefused(HeadwayError, PermissionError):
    """A server does not take this run's key; the message names it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or everything there is.

    >>> nearest("gropo", ["grpo", "spo"])
    "did you mean 'grpo'?"
    """
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
