"""The timeline: spans in wall-clock order, engines' busy shares, and nothing when it is switched off."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headway.runtime.timeline import MIN_S, Timeline
from headway.runtime.waits import Waits
from headway.types import EngineStatus


def status(busy_s: float, up_s: float) -> EngineStatus:
    return EngineStatus(version=1, num_active=3, num_waiting=0, num_tokens=10, busy_s=busy_s, up_s=up_s)


@pytest.fixture
def timeline(tmp_path: Path) -> Iterator[Timeline]:
    with closing(Timeline(tmp_path / "t.jsonl")) as timeline:
        yield timeline


def spans(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_are_on_disk_as_they_end_and_short_ones_are_left_out(timeline: Timeline, tmp_path: Path):
    before, now = time.time(), time.monotonic()
    timeline.add("learner", "train", now - 2, now - 1, step=3)
    timeline.add("learner", "proximal", now - MIN_S / 2, now)
    with pytest.raises(KeyError), timeline.span("learner", "publish"):
        time.sleep(2 * MIN_S)
        raise KeyError
    found = spans(tmp_path / "t.jsonl")
    assert [(span["lane"], span["what"]) for span in found] == [("learner", "train"), ("learner", "publish")]
    assert found[0]["end"] - found[0]["start"] == pytest.approx(1, abs=1e-3) and found[0]["step"] == 3
    assert before - 0.01 <= found[0]["end"] + 1 <= time.time() + 0.01


def test_waits_of_learner_and_evaluation_are_spans_with_their_knob(timeline: Timeline, tmp_path: Path):
    waits = Waits(limit_s=60, say=print, waited=timeline.waited)
    for who in ("learner", "evaluation", "a response"):
        with waits.wait(who, lambda: "", "max_staleness"):
            time.sleep(2 * MIN_S)
    found = [(span["lane"], span["what"], span.get("knob")) for span in spans(tmp_path / "t.jsonl")]
    assert found == [("learner", "wait", "max_staleness"), ("evaluation", "evaluation", None)]


def test_engines_are_busy_by_their_own_account_and_down_until_they_started_again(timeline: Timeline, tmp_path: Path):
    timeline.engines({"engine-0": status(1.0, 2.0)})
    time.sleep(0.02)
    timeline.engines({"engine-0": status(1.5, 4.0)})
    time.sleep(0.02)
    timeline.engines({"engine-0": status(1.5, 4.0)})  # it has not answered since
    timeline.engines({"engine-0": status(0.0, 0.005)})
    first, second = spans(tmp_path / "t.jsonl")
    assert (first["what"], first["share"], first["active"]) == ("decode", 0.25, 3)
    assert second["what"] == "down" and second["start"] == first["end"] and second["end"] > second["start"]


def test_a_timeline_that_is_off_leaves_no_file(tmp_path: Path):
    timeline = Timeline(None)
    timeline.add("learner", "train", 0.0, 9.0)
    timeline.engines({"engine-0": status(0, 1)})
    timeline.close()
    assert not list(tmp_path.iterdir())
