"""The report as one HTML page that holds everything it needs: data, style, script and plotly.js."""

import json
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from headway.errors import HeadwayError

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'">
<link rel="icon" href="data:,">
<title>Headway report</title>
<style>{css}</style>
</head>
<body>
<main>
<header class="top"><h1>Headway report</h1><span class="made" id="made"></span><span class="live" id="live"></span>\
</header>
<div id="runs"></div>
<nav id="nav"></nav>
<div id="sections"><noscript>The plots are drawn by a script in this page; it needs JavaScript.</noscript></div>
</main>
<script type="application/json" id="report">{data}</script>
<script>{plotly}</script>
<script>{js}</script>
</body>
</html>
"""


class PlotlyMissing(HeadwayError, ImportError):
    """Plots need a package that is not installed."""


def require_plotly(otherwise: str = "") -> None:
    """Raises PlotlyMissing, naming the mend, and `otherwise` what does without."""
    if find_spec("plotly") is None:
        raise PlotlyMissing(f"plots need plotly: pip install 'headway[report]'{otherwise}")


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that is finished. Raises PlotlyMissing."""
    return _page({"report": report})


def live_page(url: str, *, every_s: float) -> str:
    """A page that asks `url` for the report again and again. Raises PlotlyMissing."""
    return _page({"follow": url, "every_ms": 1000 * every_s})


def _page(data: Mapping[str, Any]) -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs

    # A name in the data that closes the script element would end it there; in JSON `<\\/` is the same as `</`.
    text = json.dumps(data, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    parts = {"css": _part("page.css"), "js": _part("page.js"), "plotly": get_plotlyjs(), "data": text}
    page = _PAGE
    for name, part in parts.items():
        page = page.replace("{" + name + "}", part, 1)
    return page


def _part(name: str) -> str:
    return (files("headway.report") / name).read_text(encoding="utf-8")
