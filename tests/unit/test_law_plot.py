"""The law's plot holds every run where it was and as what it was, and the border that was fitted."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from matplotlib.colors import same_color
from matplotlib.markers import MarkerStyle

from headway.planner.law import Cell, Interval, Law
from headway.runtime.law import law_figure

CELLS = (
    Cell(0, 1e-3, 10, collapsed=False),
    Cell(1, 1e-3, 10, collapsed=False),
    Cell(1, 1e-3, 10, collapsed=False),  # another seed
    Cell(4, 1e-3, 10, collapsed=True),
    Cell(0, 1e-2, 40, collapsed=True),
    Cell(4, 1e-4, 40, collapsed=False),
)

LAW = Law(
    a=Interval(2e-3, 1e-3, 4e-3),
    b=Interval(3e-2, 1e-2, 6e-2),
    sharpness=10.0,
    level=0.95,
    staleness_matters=9.0,
    horizon_matters=9.0,
    cells=CELLS,
)


@pytest.fixture
def axes() -> Any:
    (axes,) = law_figure(LAW).axes
    return axes


@pytest.mark.parametrize(("collapsed", "label"), [(False, "stable"), (True, "collapsed")])
def test_every_run_is_a_point_of_its_kind_at_its_bound_and_rate(axes: Any, collapsed: bool, label: str):
    (drawn,) = (points for points in axes.collections if points.get_label() == label)
    runs = [cell for cell in CELLS if cell.collapsed == collapsed]
    # A logarithmic axis has no 0.
    assert drawn.get_offsets().tolist() == [[cell.max_staleness or 0.5, cell.lr] for cell in runs]
    marker, color = ("x", "tab:red") if collapsed else ("o", "tab:blue")
    style = MarkerStyle(marker)
    expected = style.get_path().transformed(style.get_transform())
    assert np.array_equal(drawn.get_paths()[0].vertices, expected.vertices)
    assert same_color(drawn.get_edgecolor(), color)


def test_each_length_has_a_border_where_the_law_puts_it(axes: Any):
    assert [line.get_label() for line in axes.lines] == ["fit, T = 10", "fit, T = 40"]
    for line, num_steps in zip(axes.lines, (10, 40), strict=True):
        bounds, border = line.get_xdata(), line.get_ydata()
        assert bounds[0] == 0.5 and border[0] == pytest.approx(3e-2 / num_steps)
        assert bounds[1] == 1 and bounds[-1] == 4  # from bound 1 to the largest that was run
        assert border[1:] == pytest.approx([min(2e-3 / s, 3e-2 / num_steps) for s in bounds[1:]])


def test_both_axes_are_logarithmic_and_the_legend_names_all_that_is_drawn(axes: Any):
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "max_staleness" in axes.get_xlabel() and axes.get_ylabel() == "learning rate"
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["stable", "collapsed", "fit, T = 10", "fit, T = 40"]
