"""Python's garbage collector in processes that run for long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def startup_frozen() -> Iterator[None]:
    """Leave everything that lives now out of the collections within. Not to be nested.

    torch and transformers are nearly a million objects that are never garbage. Every search through them stops a
    process for 0.2 s, in the middle of a step. One search comes first, or what loading left behind would stay, too.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
