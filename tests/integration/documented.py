"""Whether docs/metrics.md knows what runs log."""

from pathlib import Path

from runs import records

from headway.algorithms.diagnostics import QUADRANTS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(run: Path) -> set[str]:
    """Names in the run's records that the page has not."""
    page = PAGE.read_text()
    found = {name for kind in ("step", "evaluation") for record in records(run, kind) for name in record}
    for quadrant in QUADRANTS:
        found = {name.replace(quadrant, "<quadrant>") for name in found}
    return {name for name in found if f"`{name}`" not in page}
