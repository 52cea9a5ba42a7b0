"""The report of a run folder: every plot drawn from what is there, every gap named, nothing made up."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run, step_record, write_lines
from typer.testing import CliRunner

from headway.cli import app
from headway.report.cards import SECTIONS, report
from headway.report.definitions import definitions
from headway.report.figures import MAX_POINTS, thin, wall_clock_s
from headway.report.run_data import NoRun, RunData, RunReader, read_runs

PLOTS = [plot for plots in SECTIONS.values() for plot in plots]


def cards(*runs: Path) -> dict[str, dict[str, Any]]:
    found = report(read_runs(runs))
    return {card["key"]: card for section in found["sections"] for card in section["cards"]}


def test_a_whole_run_has_every_plot_and_no_complaint(tmp_path: Path):
    run = make_run(tmp_path / "a")
    for key, card in cards(run).items():
        assert card["notes"] == [], key
        assert card["figures"] and all(figure["traces"] for figure in card["figures"]), key
    (summary,) = report(read_runs([run]))["runs"]
    assert summary["problems"] == []
    assert {"label": "steps", "value": "6 of 6"} in summary["tiles"]
    assert {"label": "ledger", "value": "adds up"} in summary["tiles"]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.key)
def test_every_metric_of_a_plot_is_defined_in_the_documentation(plot: Any):
    assert set(plot.metrics) <= set(definitions())
    assert plot.caption.endswith(".") and len(plot.caption) <= 120 and (plot.draw is None) != (plot.figure is None)


def test_two_runs_share_a_plot_in_colors_of_their_own_and_have_a_timeline_each(tmp_path: Path):
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed_reward=-0.2)
    found = cards(*runs)
    (figure,) = found["cosine"]["figures"]
    assert [trace["name"] for trace in figure["traces"]] == ["a", "b"]
    colors = {trace["line"]["color"] for trace in figure["traces"]}
    assert colors == {run["color"] for run in report(read_runs(runs))["runs"]} and len(colors) == 2
    assert [figure["run"] for figure in found["timeline"]["figures"]] == ["a", "b"]
    shown = [t["name"] for t in found["ess"]["figures"][0]["traces"] if t.get("showlegend", True)]
    assert shown == ["tokens", "responses"]  # a kind once, whatever the number of runs
    assert [key["run"] for key in found["ess"]["keys"]] == ["a", "b"]
    boundaries = [t["name"] for t in found["by_entropy"]["figures"][0]["traces"] if "boundary" in t["name"]]
    assert boundaries == ["ESTR boundary, τ = 1.6", "fixed boundary, log(1 + 0.2)"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path):
    runs = make_run(tmp_path / "one" / "run"), make_run(tmp_path / "two" / "run")
    assert [run.name for run in read_runs(runs)] == ["one/run", "two/run"]


def test_a_plot_without_its_data_says_why_and_the_others_stand(tmp_path: Path):
    run = make_run(tmp_path / "a")
    bare = ("mean_abs_log_rd", "mean_abs_log_rs", "stopped_fraction", "delta_by_entropy", "delta_at_switches")
    records = [{k: v for k, v in step_record(step).items() if k not in bare} for step in range(6)]
    write_lines(run / "metrics.jsonl", records)
    (run / "timeline.jsonl").unlink()
    (run / "ledger.sqlite").unlink()
    found = cards(run)
    missing = {key: card["notes"][0]["text"] for key, card in found.items() if not card["figures"]}
    assert missing.keys() == {"factors", "stopped", "by_entropy", "switches", "timeline", "ledger"}
    assert "proximal" in missing["factors"] and "timeline.jsonl is missing" in missing["timeline"]
    assert "no ledger at" in missing["ledger"]
    assert not found["staleness"]["notes"]


def test_a_run_under_way_says_how_far_it_is(tmp_path: Path):
    (run,) = read_runs([make_run(tmp_path / "a", num_steps=3, of=9)])
    assert any(problem.startswith("3 of 9 steps so far") for problem in run.problems)


def test_damaged_and_half_written_lines_are_left_out_and_named(tmp_path: Path):
    run = make_run(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:50]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "step", "st')
    (run / "config.toml").write_text("num_steps = = 3")
    (run / "ledger.sqlite").write_bytes(b"not a database" * 1000)
    (found,) = read_runs([run])
    assert [step["step"] for step in found.steps] == [0, 2, 3, 4, 5]
    told = " ".join(found.problems)
    assert "metrics.jsonl: 1 damaged lines are left out (3)" in told
    assert "config.toml is damaged" in told and "ledger" in told
    assert report([found])["sections"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(NoRun, match=r"is not a run folder.*metrics\.jsonl$"):
        read_runs([tmp_path])
    make_run(tmp_path / "a")
    with pytest.raises(NoRun, match="it holds runs, such as"):
        read_runs([tmp_path])


def test_an_empty_run_draws_nothing_and_says_so_at_every_plot(tmp_path: Path):
    run = make_run(tmp_path / "a")
    (run / "metrics.jsonl").write_text("")
    (run / "timeline.jsonl").write_text("")
    for key, card in cards(run).items():
        assert key == "ledger" or (card["notes"] and not card["figures"]), key


def test_time_goes_on_where_a_resumed_run_starts_its_clock_again():
    steps = [{"step": i, "elapsed_s": t} for i, t in enumerate((5.0, 9.0, None, 3.0, 4.0)) if t is not None]
    steps.insert(2, {"step": 2, "redone": True})
    assert wall_clock_s(RunData(Path(), "a", steps=steps)) == [5.0, 9.0, 9.0, 12.0, 13.0]


def test_long_series_are_drawn_as_means_and_keep_their_mean():
    values = [float(i % 10) for i in range(10 * MAX_POINTS)]
    x, y = thin(list(range(len(values))), values)
    assert len(y) == len(x) == MAX_POINTS
    assert all(value == pytest.approx(4.5) for value in y)
    assert thin([1.0], [None]) == ([1.0], [None])


def test_a_reader_reads_only_what_is_new_and_starts_over_when_a_run_is_resumed(tmp_path: Path):
    run = make_run(tmp_path / "a", num_steps=3, of=6)
    reader = RunReader(run)
    assert len(reader.read().steps) == 3
    before = reader.stamp
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_record(3)) + "\n")
    assert reader.stamp != before
    assert len(reader.read().steps) == 4
    kept = (run / "metrics.jsonl").read_text().splitlines()[:2]
    (run / "new").write_text("\n".join(kept) + "\n" + " " * 100000)
    (run / "new").replace(run / "metrics.jsonl")
    assert [step["step"] for step in reader.read().steps] == [0]


def test_the_page_holds_its_scripts_its_data_and_no_address(tmp_path: Path):
    run = make_run(tmp_path / "a")
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text()
    assert "Plotly.react" in page and "plotly.js v" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?https?:", page)
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert [section["title"] for section in found["report"]["sections"]] == list(SECTIONS)
    # The reason of a drop holds a closing script tag; had it ended the element, this JSON would have been cut there.
    assert "alert(1)</script>" in json.dumps(found["report"]["sections"])


def test_without_plotly_the_report_names_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.report.page.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["report", str(make_run(tmp_path / "a"))])
    assert result.exit_code == 1
    assert "pip install 'headway[report]'" in result.output


def test_not_a_number_reaches_the_page_as_a_gap(tmp_path: Path):
    run = make_run(tmp_path / "a")
    write_lines(run / "metrics.jsonl", [step_record(step, grad_norm=float("nan")) for step in range(3)])
    json.dumps(report(read_runs([run])), allow_nan=False)
    assert cards(run)["gradient"]["figures"][0]["traces"][0]["y"] == [None, None, None]
