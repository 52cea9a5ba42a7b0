"""Hints for names that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or everything there is."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
