"""A study's plots show every run's curve and end, the means over seeds and their intervals."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from headway.study.design import Study, load_study
from headway.study.outcome import Outcome
from headway.study.plots import draw, draw_figures

FILE = """
[grid]
algorithm = ["grpo", "estr"]
max_staleness = [0, 4]
seed = [0, 1, 2]
"""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "s.toml").write_text(FILE)
    return load_study(tmp_path / "s.toml")


def outcome(curve: dict[int, float], *, collapsed: bool = False) -> Outcome:
    end = list(curve.values())[-1]
    unknown = dict.fromkeys(("steps_to_goal", "seconds_to_goal", "reward", "staleness", "ess", "k3", "cosine"))
    known = {"start": 0.1, "end": end, "best": end, "area": end, "seconds": 1.0, "curve": curve}
    return Outcome(**known, **unknown, collapsed_at=2 if collapsed else None)


OUTCOMES: dict[str, Outcome | None] = {
    "grpo-max_staleness0-seed0": None,  # failed
    "grpo-max_staleness4-seed0": outcome({0: 0.1, 2: 0.4, 4: 0.4}),
    "grpo-max_staleness4-seed1": outcome({0: 0.3, 4: 0.5}),
    "grpo-max_staleness4-seed2": outcome({0: 0.2, 4: 0.6}, collapsed=True),
    "estr-max_staleness0-seed0": outcome({0: 0.1, 4: 0.9}),
}
"""The first panel has one run, of the second series; the second panel has three, of the first."""


def lines(axes: Any, marker: str = "None") -> list[Any]:
    return [line for line in axes.lines if line.get_marker() == marker]


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


def test_there_is_a_panel_for_each_value_of_the_second_axis(study: Study):
    for figure in draw_figures(study, OUTCOMES).values():
        assert [axes.get_title() for axes in figure.axes] == ["max_staleness 0", "max_staleness 4"]


def test_curves_are_those_of_every_seed_and_their_mean_where_all_were_measured(study: Study):
    fresh, stale = draw_figures(study, OUTCOMES)["curves"].axes
    *seeds, mean = lines(stale)
    curves = [found.curve for name, found in OUTCOMES.items() if found and "grpo" in name]
    assert [points(line) for line in seeds] == [list(curve.items()) for curve in curves]
    assert points(mean) == [(0, pytest.approx(0.2)), (4, pytest.approx(0.5))]  # version 2 is known of one seed alone
    assert all(line.get_alpha() < 1 and line.get_linewidth() < mean.get_linewidth() for line in seeds)
    assert {line.get_color() for line in lines(stale)} == {"C0"} and mean.get_label() == "grpo"
    assert [points(line) for line in lines(fresh)] == [[(0, 0.1), (4, 0.9)]] * 2


def test_a_series_has_one_colour_in_all_panels_and_one_entry_in_the_legend(study: Study):
    both = OUTCOMES | {"estr-max_staleness4-seed0": outcome({0: 0.1, 4: 0.2})}
    figure = draw_figures(study, both)["curves"]
    colors = [{line.get_label(): line.get_color() for line in lines(axes)} for axes in figure.axes]
    assert colors[0]["estr"] == colors[1]["estr"] == "C1" and colors[1]["grpo"] == "C0"
    (legend,) = figure.legends
    named = {
        text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert named == {"estr": "C1", "grpo": "C0"}


def test_every_run_ends_as_a_point_and_a_collapsed_one_as_a_red_cross(study: Study):
    fresh, stale = draw_figures(study, OUTCOMES)["ends"].axes
    held, collapsed = lines(stale, "o"), lines(stale, "x")
    assert [points(line) for line in held] == [[(0.4, 0)], [(0.5, 0)]]
    assert [points(line) for line in collapsed] == [[(0.6, 0)]]
    assert {line.get_color() for line in held} == {"tab:blue"} and collapsed[0].get_color() == "tab:red"
    assert [points(line) for line in lines(fresh, "o")] == [[(0.9, 1)]] and lines(fresh, "x") == []


def test_ends_have_their_mean_and_students_interval_over_seeds(study: Study):
    fresh, stale = draw_figures(study, OUTCOMES)["ends"].axes
    (mean,), (interval,) = lines(stale, "|"), lines(stale)
    assert points(mean) == [(pytest.approx(0.5), 0)]
    half = 4.302653 * 0.1 / 3**0.5
    assert points(interval) == [(pytest.approx(0.5 - half), 0), (pytest.approx(0.5 + half), 0)]
    assert len(lines(fresh, "|")) == 1 and lines(fresh) == []  # one seed has no interval


def test_the_first_series_of_the_ends_is_named_and_on_top_in_every_panel(study: Study):
    for axes in draw_figures(study, OUTCOMES)["ends"].axes:
        assert list(axes.get_yticks()) == [0, 1] and axes.yaxis_inverted()
    left = draw_figures(study, OUTCOMES)["ends"].axes[0]
    assert [label.get_text() for label in left.get_yticklabels()] == ["grpo", "estr"]


def test_both_figures_are_written_under_the_name_of_the_study(study: Study, tmp_path: Path):
    (out := tmp_path / "out").mkdir()
    draw(study, OUTCOMES, out)
    assert sorted(path.name for path in out.iterdir()) == ["s-curves.png", "s-ends.png"]
    for name, figure in draw_figures(study, OUTCOMES).items():
        figure.savefig(again := tmp_path / f"{name}.png", dpi=110)
        assert (out / f"s-{name}.png").read_bytes() == again.read_bytes()
