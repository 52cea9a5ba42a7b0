"""What the commands share: consoles, common options, and how an error ends a command."""

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.errors import HeadwayError
from headway.processes.stops import stops_interrupt

console = Console()
errors = Console(stderr=True)

Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; keys are dotted.")]
RunDir = Annotated[Path, typer.Argument(help="A run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a used-up quota, a file over the limit."""

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""A file of somebody else, a file system that is mounted to be read."""


def show(text: str) -> None:
    """Text as it is: paths, names and log lines may hold brackets, which are no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """The same, to stderr."""
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


def loading(what: object) -> None:
    """Said before the libraries are imported, which takes seconds in which a command would look dead."""
    say(f"loading {what} …")


def told_now_and_then(done: str, *, every_s: float = 5.0) -> Callable[[int, float], None]:
    """A callback of a step and its loss that says how far a long command is."""
    last = time.monotonic()

    def tell(step: int, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            say(f"{done} step {step}, loss {loss:.4f}")

    return tell


@contextmanager
def plain_errors(stopped: str = "stopped") -> Iterator[None]:
    """A user's mistake or a stopped command ends with one clear message; a bug keeps its traceback."""
    try:
        with stops_interrupt():
            yield
    except HeadwayError as error:
        say(f"error: {error}")
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL + CLOSED:
            raise
        mend = "make room" if error.errno in FULL else "let this user read and write there"
        say(f"error: {error}; {mend}, then `headway resume` continues a run that was under way")
        sys.exit(1)
    except KeyboardInterrupt:
        say(stopped)
        sys.exit(130)
