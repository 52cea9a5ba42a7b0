"""Which runs a law may be fitted to, which settings it belongs to, and what a recommendation admits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from headway.cli import app
from headway.config import RunConfig, load_config
from headway.planner.law import Cell, Law, fit
from headway.runtime.law import LAW_SCHEMA, SweepError, apply_law, law_figure, read_cells, recommendation
from headway.runtime.law_settings import belongs_to
from headway.runtime.run_folder import RunFolder

SWEPT = ("num_steps=10", "optimizer.schedule=constant", "guard.action=off", "exact_lag=true")


def ended_run(path: Path, *settings: str, collapsed: bool = False) -> RunConfig:
    folder = RunFolder.create(path, load_config(None, [*SWEPT, "evaluation.test_size=0", *settings]))
    folder.checkpoint(10).mkdir(parents=True)
    rewards = [0.5] * 5 + [0.0 if collapsed else 0.5] * 5
    steps = [{"kind": "step", "step": i, "reward": r, "staleness_sample_mean": 1.0} for i, r in enumerate(rewards)]
    folder.metrics_path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return RunFolder.open(path)[1]


@pytest.mark.parametrize(
    "setting",
    [
        *("proximal=behavior", "engines.round_weights=int8", "engines.on_update=interrupt", "over_bound=drop"),
        *("optimizer.beta2=0.999", "optimizer.weight_decay=0.1", "optimizer.vcpo_lr_scale=true", "optimizer.eps=1e-6"),
        *("distill.weight=2.0", "ewma.decay=0.5", "batch_size=128", "sampling.top_p=0.9", "task.options.digits=2"),
    ],
)
def test_runs_that_differ_in_what_an_update_does_are_not_fitted_together(tmp_path: Path, setting: str):
    ended_run(tmp_path / "a")
    ended_run(tmp_path / "b", setting, "max_staleness=0", "exact_lag=false")
    with pytest.raises(SweepError, match=rf"differ in more than .*\({setting.partition('=')[0]}\)"):
        read_cells(tmp_path)


def test_what_a_sweep_varies_and_what_only_takes_time_may_differ(tmp_path: Path):
    ended_run(tmp_path / "a")
    ended_run(
        tmp_path / "b",
        *("max_staleness=8", "seed=3", "optimizer.lr=1e-3", "engines.num_slots=8", "engines.num_engines=2"),
        *("learner.micro_batch_tokens=4096", "evaluation.every=5", "checkpoint.keep=1", "report.timeline=false"),
        *("guard.window=5", "record=true", "task.latency_s=0.1"),
    )
    assert [cell.max_staleness for cell in read_cells(tmp_path)] == [4, 8]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("exact_lag=false", "much younger: a law needs exact_lag = true"),
        ("optimizer.schedule=linear", 'schedule = "linear"'),
        ("guard.action=lower_lr", 'guard.action = "lower_lr"'),
    ],
)
def test_runs_that_did_not_train_at_their_rate_and_lag_are_refused(tmp_path: Path, setting: str, complaint: str):
    ended_run(tmp_path / "a", setting)
    with pytest.raises(SweepError, match=complaint):
        read_cells(tmp_path)


def slow_border(exponent: float) -> Law:
    """A law fitted to runs whose border falls as 1/S^exponent, at S = 4, 8, 16 and T = 10."""
    rates = [1e-5 * 2**i for i in range(10)]
    borders = {0: 4e-3, **{bound: 4e-4 * (4 / bound) ** exponent for bound in (4, 8, 16)}}
    return fit(
        [Cell(bound, lr, 10, lr > border) for bound, border in borders.items() for lr in rates for _ in range(4)]
    )


def test_a_recommendation_says_that_its_slope_is_rejected_and_where_it_extrapolates(tmp_path: Path):
    config, path = load_config(None, SWEPT), tmp_path / "law.json"
    law = slow_border(0.0)
    path.write_text(json.dumps({"schema": LAW_SCHEMA, "belongs_to": belongs_to(config), "law": law.to_dict()}))
    rejected, outside = recommendation(path, max_staleness=2, num_steps=10)["doubts"]
    assert "rejects the law's 1/S" in rejected and "below the swept bounds the law allows too much" in rejected
    assert outside == "max_staleness = 2 lies outside the sweep (4 to 16): extrapolated as 1/S"
    assert len(recommendation(path, max_staleness=8, num_steps=10)["doubts"]) == 1
    assert recommendation(path, max_staleness=0, num_steps=10)["doubts"] == []
    assert "num_steps = 40" in recommendation(path, max_staleness=0, num_steps=40)["doubts"][0]
    said: list[str] = []
    optimizer = config.optimizer.model_copy(update={"lr": "law", "law": str(path)})
    apply_law(config.model_copy(update={"optimizer": optimizer, "max_staleness": 2, "proximal": "ewma"}), said.append)
    assert any("other settings of proximal;" in text for text in said)
    assert any("too much" in text for text in said) and any("outside the sweep" in text for text in said)


def test_a_border_that_falls_as_the_law_says_leaves_no_doubt_within_the_sweep():
    assert slow_border(1.0).doubts(8, 10) == []


def test_the_commands_fit_a_sweep_draw_it_and_recommend_from_it(tmp_path: Path):
    for bound in (0, 1, 4):
        for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
            sets = (f"max_staleness={bound}", f"optimizer.lr={lr}", f"exact_lag={str(bound > 0).lower()}")
            ended_run(tmp_path / "sweep" / f"S{bound}-{lr}", *sets, collapsed=lr * max(bound, 0.3) > 2e-3)
    law, plot = tmp_path / "law.json", tmp_path / "law.png"
    told = headway("law", "fit", tmp_path / "sweep", f"--out={law}", f"--plot={plot}")
    assert "1/1" in told and "0/1" in told and f"law: {law}" in told.replace("\n", "")
    fitted = json.loads(headway("law", "fit", tmp_path / "sweep", f"--out={law}", "--json"))
    law_figure(Law.from_dict(fitted)).savefig(tmp_path / "again.png", dpi=150)
    assert plot.read_bytes() == (tmp_path / "again.png").read_bytes()
    assert fitted == json.loads(law.read_text())["law"]
    assert 1e-3 < fitted["a"]["estimate"] < 4e-3  # between the last stable and the first collapsed S·η
    near, far = (
        json.loads(headway("law", "recommend", law, f"--staleness={bound}", "--steps=10", "--json"))["lr"]
        for bound in (4, 8)
    )
    assert near == pytest.approx(2 * far) and near * 4 < 4e-3


def headway(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout
