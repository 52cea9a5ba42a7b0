"""What every metric means: read from docs/metrics.md, the one place where it is written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve()

PAGES = (_HERE.with_name("metrics.md"), _HERE.parents[3] / "docs" / "metrics.md")
"""Where the page lies in an installed package, and in a checkout."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One row of a table of docs/metrics.md.

    Example: `Definition(name="d_intra", unit="versions", meaning="newest − oldest version …", section="Of the batch")`
    """

    name: str
    unit: str
    meaning: str
    section: str


def definitions() -> dict[str, Definition]:
    """Metric name to its definition. Raises FileNotFoundError when the package was built without the page."""
    page = next((path for path in PAGES if path.is_file()), None)
    if page is None:
        raise FileNotFoundError(f"neither {PAGES[0]} nor {PAGES[1]} exists: Headway was packaged without its metrics")
    return {found.name: found for found in parse(page.read_text(encoding="utf-8"))}


def parse(text: str) -> Iterator[Definition]:
    """Definitions of every table whose head names a `metric` column and a `meaning` column.

    >>> [d.meaning for d in parse("| metric | unit | meaning |\\n|---|---|---|\\n| `a`, `b` | s | both |")]
    ['both', 'both']
    """
    section, head = "", [""]
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.strip("# ").replace("`", "")
        if not line.startswith("|"):
            head = [""]
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if "metric" in cells:
            head = cells
        elif head[0] == "metric" and len(cells) == len(head):
            row = dict(zip(head, cells, strict=True))
            for name in re.findall(r"`([^`]+)`", row["metric"]):
                yield Definition(name, row.get("unit", ""), row["meaning"], section)
