"""`headway watch` beside a run that trains: its page and its feed over HTTP, from a process of its own."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("plotly")

from runs import Running, records, train_arguments, wait_for


@pytest.fixture
def training(model: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that has made a step, and goes on for longer than anybody watches."""
    run, log = tmp_path / "run", tmp_path / "train.log"
    never = {"evaluation__every": 0, "evaluation__test_size": 0, "checkpoint__every": 1000}
    running = Running.start(*train_arguments(run, model, num_steps=4000, task__latency_s=0.05, **never), log=log)
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and num_written(run), limit_s=60, what="first step")
        yield run
    finally:
        running.process.send_signal(signal.SIGTERM)
        ended = running.process.wait(60)
    assert ended == 130, log.read_text()  # neither the watcher nor anything else had ended it before


@pytest.fixture
def watching(training: Path, tmp_path: Path) -> Iterator[str]:
    """The address that `headway watch` printed."""
    log = tmp_path / "watch.log"
    watcher = Running.start("watch", training, log=log)
    try:
        wait_for(lambda: "Ctrl-C" in log.read_text() or watcher.process.poll() is not None, limit_s=30, what="address")
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", log.read_text())
        yield url
    finally:
        watcher.process.send_signal(signal.SIGINT)
        ended = watcher.process.wait(30)
    assert ended == 130 and "stopped watching; the runs go on" in log.read_text()


def num_written(run: Path) -> int:
    return len(records(run, "step"))


def ask(url: str, seen: str = "") -> dict:
    """What the feed says to a page that shows `seen`; empty while nothing is new."""
    with urlopen(url.replace("/?", "/report?") + f"&seen={seen}") as answer:
        return json.loads(answer.read() or "{}")


def num_shown(news: dict) -> int:
    """Steps in the tile `N of 4000`, which must be the points of the curve of the gradient norm."""
    (tile,) = (tile["value"] for tile in news["report"]["runs"][0]["tiles"] if tile["label"] == "steps")
    cards = [card for section in news["report"]["sections"] for card in section["cards"]]
    (curve,) = (card["figures"][0]["traces"][0] for card in cards if "grad_norm" in card["metrics"])
    assert tile == f"{len(curve['x'])} of 4000"
    return len(curve["x"])


@pytest.mark.timeout(180)
def test_a_watcher_shows_the_steps_of_a_run_as_it_writes_them(training: Path, watching: str):
    with urlopen(watching) as page:
        assert b"Headway report" in page.read()
    first = ask(watching)
    before = num_shown(first)
    assert 0 < before <= num_written(training)
    wait_for(lambda: num_written(training) > before + 2, limit_s=30, what="newer steps")
    again = ask(watching, first["stamp"])
    assert before + 2 < num_shown(again) <= num_written(training)
