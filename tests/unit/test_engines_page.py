import json
from pathlib import Path

from typer.testing import CliRunner

from headway.cli import app
from headway.engine.support import ENGINES, SUPPORT, markdown

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_and_the_doctor_show_the_same_support_table():
    assert f"<!-- table: headway.engine.support -->\n{markdown()}\n<!-- end of table -->" in PAGE.read_text()
    shown = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["engines"]
    assert shown == {feature: dict(zip(ENGINES, notes, strict=True)) for feature, notes in SUPPORT.items()}


def test_the_doctor_gives_every_engine_a_column():
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"}).stdout
    header = next(line for line in shown.splitlines() if "torch" in line and "sglang" in line)
    assert [cell.strip() for cell in header.split("┃")[2:-1]] == list(ENGINES)
