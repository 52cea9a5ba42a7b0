"""Where what is made once on a machine is kept: models of the cold start, machine code."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$HEADWAY_CACHE`, or `~/.cache/headway`."""
    return Path(os.environ.get("HEADWAY_CACHE", "~/.cache/headway")).expanduser()
