from pathlib import Path

from headway.engine.support import ENGINES, SUPPORT, markdown
from headway.runtime.doctor import examine

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_and_the_doctor_show_the_same_support_table():
    assert f"<!-- table: headway.engine.support -->\n{markdown()}\n<!-- end of table -->" in PAGE.read_text()
    shown = {finding.what: finding.note for finding in examine()}
    for feature, notes in SUPPORT.items():
        assert all(
            f"{engine}: {note}" in shown[f"engines: {feature}"] for engine, note in zip(ENGINES, notes, strict=True)
        )
