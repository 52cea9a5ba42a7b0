"""The page in a real browser: every plot is drawn, nothing is asked of the network, and a phone can show it."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run, step_record

from headway.report.cards import SECTIONS, write_report
from headway.report.definitions import definitions
from headway.report.watch import make_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]

DRAWN = """() => [...document.querySelectorAll(".plot")].map((place) => ({
    id: place.id,
    marks: place.querySelectorAll(
        ".scatterlayer path.js-line, .scatterlayer path.point, .scatterlayer path.js-fill, .barlayer path, .sankey-link"
    ).length,
    width: place.getBoundingClientRect().width,
}))"""
"""How many lines, bars, points and flows each plot holds."""

SMALL_TEXT = """() => [...document.querySelectorAll("body *")].filter((element) => {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const shown = element.getClientRects().length && getComputedStyle(element).visibility !== "hidden";
    return own && shown && !["SCRIPT", "STYLE"].includes(element.tagName)
        && parseFloat(getComputedStyle(element).fontSize) < 12;
}).map((element) => element.textContent.slice(0, 40))"""
"""Text smaller than 12 pixels."""

LINKS = """() => Object.fromEntries([...document.querySelectorAll(".card")].map((card) => [card.id,
    [...card.querySelectorAll(".links a")].map((link) => {
        const target = document.querySelector(link.getAttribute("href"));
        const said = target && [target.querySelector("dt").firstChild, target.querySelector("dd")];
        return [link.textContent, said && said.map((part) => part.textContent)];
    })]))"""
"""Of each card: the links to its definitions, and the name and the words that each leads to."""

TOO_WIDE = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    assert CHROMIUM, "no Chromium on this machine: run `make test-browser`, which installs it"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        profile = tmp_path_factory.mktemp("profile")
        context = play.chromium.launch_persistent_context(str(profile), executable_path=CHROMIUM, args=FLAGS)
        context.set_default_timeout(300_000)
        yield context
        context.close()


class Opened:
    """A page, and all that it complained about or asked for."""

    def __init__(self, browser: Any, url: str, *, width: int, wait: bool = True) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        if wait:
            self.wait_until("document.body.dataset.drawn > 0")

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def wait_until(self, condition: str) -> None:
        """Playwright's own wait evaluates text in the page, which a live page's policy forbids, as it should."""
        deadline = time.monotonic() + 30
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            self.page.wait_for_timeout(50)


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    pages: list[Opened] = []

    def open_page(url: str, **options: Any) -> Opened:
        pages.append(Opened(browser, url, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.page.close()


NUM_PLOTS = sum(map(len, SECTIONS.values()))
NUM_PANELS = sum(plot.figure is not None for plots in SECTIONS.values() for plot in plots)


@pytest.mark.parametrize(("width", "num_runs"), [(1280, 1), (390, 1), (1280, 2), (390, 2)])
def test_every_plot_is_drawn_readable_and_by_itself(
    tmp_path: Path, opened: Callable[..., Opened], width: int, num_runs: int
):
    runs = [make_run(tmp_path / f"run-{i}-{'long' * 8}", seed_reward=0.1 * i) for i in range(num_runs)]
    file = write_report(runs, tmp_path / "report.html")
    page = opened(file.as_uri(), width=width)
    plots = page.evaluate(DRAWN)
    assert len(plots) == NUM_PLOTS + (num_runs - 1) * NUM_PANELS
    assert [plot["id"] for plot in plots if not plot["marks"]] == []
    assert all(plot["width"] <= width for plot in plots)
    assert page.complaints == []
    assert page.requests == [file.as_uri()]
    assert page.evaluate(TOO_WIDE) <= 0
    assert page.evaluate(SMALL_TEXT) == []


def test_every_link_within_the_page_leads_somewhere(tmp_path: Path, opened: Callable[..., Opened]):
    page = opened(write_report([make_run(tmp_path / "a")], None).as_uri(), width=1280)
    dangling = """() => [...document.querySelectorAll('a[href^="#"]')].map((link) => link.getAttribute("href"))
        .filter((href) => !document.getElementById(href.slice(1)))"""
    assert page.evaluate(dangling) == []


def test_every_card_links_to_the_definition_of_each_of_its_metrics(tmp_path: Path, opened: Callable[..., Opened]):
    page = opened(write_report([make_run(tmp_path / "a")], None).as_uri(), width=1280)
    meanings = {name: found.meaning.replace("`", "") for name, found in definitions().items()}
    plots = [plot for plots in SECTIONS.values() for plot in plots]
    assert all(plot.metrics for plot in plots)
    assert page.evaluate(LINKS) == {
        f"plot-{plot.key}": [[name, [name, meanings[name]]] for name in plot.metrics] for plot in plots
    }


def test_a_run_with_nothing_in_it_is_a_page_of_reasons(tmp_path: Path, opened: Callable[..., Opened]):
    run = make_run(tmp_path / "a")
    for name in ("metrics.jsonl", "timeline.jsonl"):
        (run / name).write_text('{"kind": "st')
    (run / "ledger.sqlite").unlink()
    page = opened(write_report([run], None).as_uri(), width=390, wait=False)
    assert page.evaluate("() => document.querySelectorAll('.card .note').length") == NUM_PLOTS
    assert page.complaints == [] and page.evaluate(DRAWN) == []


def test_the_live_page_draws_steps_as_they_come_and_says_when_the_watch_has_stopped(
    tmp_path: Path, opened: Callable[..., Opened]
):
    run = make_run(tmp_path / "a", num_steps=3, of=6)
    server, url = make_server([run], port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    page = opened(url, width=1280)
    points = "() => document.getElementById('cosine-0').data[0].x.length"
    assert page.evaluate(points) == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_record(3)) + "\n")
    page.wait_until(f"({points})() === 4")
    assert page.complaints == []
    assert {asked.split("?")[0] for asked in page.requests} == {url.split("?")[0], url.split("?")[0] + "report"}
    server.shutdown()
    thread.join()
    server.server_close()
    page.wait_until("document.getElementById('live').className.includes('lost')")
