"""What `headway compare` shows, from plain data: tables with what is unknown left out, and the page of plots."""

import io

import pytest
from rich.console import Console

from headway.report.compare import QUADRANTS, comparison_page, direction_table, stopped_table, weight_table
from headway.runtime.measure import objective_name


def method(name: str, **changes: object) -> dict[str, object]:
    return {
        "algorithm": name,
        "reference": "grpo, token_mean",
        "loss": 0.1,
        "grad_norm": 2.0,
        "cosine": 0.625,
        "cosine_se": 0.05,
        "bootstrap": {"mean": 0.5, "sd": 0.08, "low": 0.3, "high": 0.7},
        "of_fresh": 0.9,
        "difference": 0.0,
        "difference_se": 0.01,
        "relative_variance": 0.5,
        "weights": {"mean_weight": 1.0, "weight_ess": 0.9, "stopped_fraction": 0.125, "stopped_positive_up": 0.125},
        "metrics": {"loss_balance": 1.0},
    } | changes


def step(number: int, *methods: dict[str, object]) -> dict[str, object]:
    floor = {"fresh": 0.7, "fresh_sd": 0.02, "half_cosine": 0.6, "half_cosine_sd": 0.01}
    floor |= {"reference_truth": 0.9, "batch_truth": 0.8}
    batch = {"num_groups": 4, "num_degenerate_groups": 1, "staleness_token_mean": 1.5, "staleness_token_max": 3}
    batch |= {"mean_abs_delta": 0.01, "max_ratio": 1.5, "ess_tokens": 0.9, "ess_responses": 0.8}
    batch |= {f"share_{name}": 0.25 for name in QUADRANTS}
    reference = {"name": "grpo, token_mean", "grad_norm": 2.5, "relative_variance": 0.4, "floor": floor}
    return {"step": number, "policy_version": number, "batch": batch, "references": [reference], "algorithms": methods}


def shown(table: object, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_errors_that_cannot_be_known_are_a_dash_and_never_a_zero():
    one = method("grpo", cosine_se=None, bootstrap=None, difference_se=None, of_fresh=None, relative_variance=None)
    text = shown(direction_table(step(3, one), baseline="grpo"))
    (row,) = (line for line in text.splitlines() if "grpo " in line and "0.625" in line)
    assert "0.625 ± –" in row and "+0.000 ± –" in row
    assert row.count("–") == 4
    assert "0.500 ± 0.080" in shown(direction_table(step(3, method("grpo")), baseline="grpo"))
    assert "0.050" in shown(direction_table(step(3, method("grpo")), baseline="grpo"))
    assert "–" in shown(weight_table(step(3, one)))
    assert "12.5%" in shown(stopped_table(step(3, one)))


def test_tables_are_whole_on_eighty_columns():
    one = step(3, method("decoupled_masked", difference=-0.004), method("estr"))
    for table in (direction_table(one, baseline="estr"), weight_table(one), stopped_table(one)):
        text = shown(table, width=80)
        assert "…" not in text and "estr" in text and "decoupled" in text
    assert "0.625 ± 0.050" in shown(direction_table(one, baseline="estr"), width=80)


def test_the_page_holds_every_plot_every_algorithm_and_its_own_scripts():
    pytest.importorskip("plotly")
    methods = (method("grpo"), method("estr:tau=0.5", cosine_se=None))
    page = comparison_page({"steps": [step(3, *methods), step(7, *methods)]})
    assert page.count('class="plotly-graph-div"') == 4  # cosines, what is stopped at each step, variances
    assert page.count("Plotly.newPlot(") >= 4 and "cdn.plot.ly" not in page.split("<script")[1].split(">")[0]
    for words in ("estr:tau=0.5", "step 3: a fresh batch", "Step 7: fraction of tokens", "Variance of the gradient"):
        assert words in page
    assert "A&lt;0, r&lt;1 25.0%" in page and page.rstrip().endswith("</html>")


def test_references_that_differ_in_any_part_of_the_objective_have_names_of_their_own():
    objectives = [("grpo", "fixed", None), ("grpo", "fixed", 64), ("grpo", "fixed", 128), ("rloo", "fixed", 64)]
    assert len({objective_name(objective) for objective in objectives}) == 4
