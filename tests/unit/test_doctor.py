"""The doctor's list of optional packages is that of the project: nothing missing, nothing that nobody uses."""

import re
import tomllib
from pathlib import Path

import pytest

from headway.runtime.doctor import OPTIONAL

ROOT = Path(__file__).parents[2]


def test_every_extra_of_the_project_has_a_row_and_every_row_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {extra for extra, _ in OPTIONAL.values()} == set(project["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize("module", OPTIONAL)
def test_every_package_it_names_is_used_somewhere(module: str):
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    users = [path for path in files if path.name != "doctor.py" and re.search(rf"\b{module}\b", path.read_text())]
    assert users
