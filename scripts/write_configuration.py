"""Write docs/configuration.md from the settings' own docstrings: `python scripts/write_configuration.py`."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from headway.config import RunConfig, Section

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

A run is one TOML file; every key has a default, so a file holds only what differs. Override on the command line with
`--set key=value`, tables with dots (`--set optimizer.lr=1e-3`). Unknown keys are refused with the nearest name. The
resolved settings are saved as `config.toml` in the run folder.

```toml
algorithm = "grpo"
max_staleness = 4

[task]
name = "addition"

[optimizer]
lr = 3e-4
```

This page is written by `python scripts/write_configuration.py` from the settings themselves.
"""


def page() -> str:
    """The whole page as Markdown."""
    fields = RunConfig.model_fields
    sections = {name: field.default for name, field in fields.items() if isinstance(field.default, Section)}
    top = {name: field for name, field in fields.items() if name not in sections}
    parts = [HEAD, "## Top level\n", _table(top)]
    for name, section in sections.items():
        parts += [f"\n## `[{name}]`\n", _table(type(section).model_fields)]
    return "\n".join(parts)


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = [
        f"| `{name}` | `{_shown(field.default)}` | {' '.join((field.description or '').split())}{_choices(field)} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _choices(field: FieldInfo) -> str:
    """The values to type, where there are only so many."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f" One of {', '.join(f'`{_shown(choice)}`' for choice in choices)}." if choices else ""


def _shown(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case _:
            return str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
