"""Costs that a simulated run had are learned from its records again, and `headway plan --run` plans with them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("simpy")
pytest.importorskip("scipy")

from simulated_runs import LOADED, TRUE, config_of, written
from typer.testing import CliRunner

from headway.cli import app
from headway.config import load_config
from headway.planner.setup import Setup
from headway.planner.simulate import simulate
from headway.runtime import learned_costs
from headway.runtime.learned_costs import learn
from headway.runtime.observed import CostsUnknown, observe
from headway.runtime.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_costs, "_num_cores", lambda config: 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "sync": written(folder / "sync", TRUE),
        "narrow": written(folder / "narrow", replace(TRUE, num_slots=8)),
        "async": written(folder / "async", LOADED, num_steps=40),
    }


def test_what_each_side_costs_alone_is_learned_again(runs: dict[str, Path]):
    found = learn([observe(runs["sync"]), observe(runs["narrow"])], config=config_of(TRUE, 40))
    assert found.engine.step_s == pytest.approx(0.004, rel=0.05)
    assert found.engine.sequence_s == pytest.approx(0.0002, rel=0.05)
    assert found.learner.token_s == pytest.approx(0.0004, rel=0.02)
    assert found.shared.controller_s == pytest.approx(0.002, rel=0.1)
    assert (found.sync.publish_s, found.sync.transfer_s) == (pytest.approx(0.02, rel=0.02), pytest.approx(0.01))
    assert found.prompt_tokens == 6
    assert simulate(found).step_s == pytest.approx(simulate(TRUE).step_s, rel=0.03)


@pytest.mark.parametrize("num_cores", [2, 4])
def test_what_they_cost_each_other_is_learned_again(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int
):
    monkeypatch.setattr(learned_costs, "_num_cores", lambda config: num_cores)
    loaded = replace(LOADED, shared=replace(LOADED.shared, num_cores=num_cores))
    asked = config_of(loaded, 60)
    beside = observe(written(tmp_path / "async", loaded, num_steps=40))
    found = learn([observe(runs["sync"]), observe(runs["narrow"]), beside], config=asked)
    assert found.sync.transfer_s == pytest.approx(0.05)  # that of engines at work, not the median of all
    assert found.shared.engine_slowdown == pytest.approx(1.4, rel=0.1)
    assert found.shared.learner_slowdown == pytest.approx(1.3, rel=0.05)
    assert simulate(found).step_s == pytest.approx(simulate(loaded).step_s, rel=0.05)
    idle = learn([observe(runs["sync"]), observe(runs["async"])], config=config_of(TRUE, 40))
    assert idle.sync.transfer_s == pytest.approx(0.01)


def test_how_much_steps_of_one_size_vary_is_learned_run_by_run_and_blind_to_a_few_stops(tmp_path: Path):
    shaky = replace(TRUE, learner=replace(TRUE.learner, jitter=0.2))
    first = observe(written(tmp_path / "first", shaky, num_steps=60))
    slower = replace(first, steps=[s | {"train_s": 1.5 * s["train_s"]} for s in first.steps])
    stopped = replace(
        first, steps=[s | {"train_s": s["train_s"] * (4 if i in (3, 9) else 1)} for i, s in enumerate(first.steps)]
    )
    for seen in ([first], [first, slower], [stopped]):
        assert learn(seen, config=first.config).learner.jitter == pytest.approx(0.2, abs=0.05)
    assert learn([observe(written(tmp_path / "steady", TRUE))], config=first.config).learner.jitter < 0.01


def test_ranks_share_the_training_and_lengths_of_all_runs_count(runs: dict[str, Path]):
    one, two = observe(runs["sync"]), observe(runs["narrow"])
    ranks = load_config(None, ["learner.num_ranks=4"]).learner
    sharded = replace(one, config=one.config.model_copy(update={"learner": ranks}))
    found = learn([sharded], config=sharded.config)
    assert found.learner_devices == 4 and found.learner.token_s == pytest.approx(0.0016, rel=0.02)
    short = replace(two, lengths=np.ones_like(two.lengths))
    drawn = learn([one, short], config=one.config).lengths.draw(np.random.default_rng(0), 400, 4)
    assert 0.4 < np.mean((drawn == 1).all(axis=1)) < 0.6


CROWDED = replace(LOADED, shared=replace(LOADED.shared, learner_slowdown=1.0))


@pytest.mark.parametrize("setup", [CROWDED, replace(TRUE, num_slots=8)], ids=["asynchronous", "synchronous"])
def test_what_engines_on_too_few_cores_cost_each_other_counts_once(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(learned_costs, "_num_cores", lambda config: 2)
    crowded = replace(setup, num_engines=4, shared=replace(setup.shared, num_cores=2))
    run = observe(written(tmp_path / "run", crowded, num_steps=40))
    found = learn([run], config=run.config)
    assert simulate(found).step_s == pytest.approx(simulate(crowded).step_s, rel=0.1)


def test_a_controller_that_works_longer_than_the_learner_trains_makes_no_negative_cost(runs: dict[str, Path]):
    run = observe(runs["async"])
    busy = replace(run, steps=[step | {"controller_s": 2 * step["train_s"]} for step in run.steps])
    assert learn([busy], config=run.config).learner.token_s == pytest.approx(
        learn([run], config=run.config).learner.token_s
    )


def test_what_a_pass_that_prefills_costs_is_learned_and_another_width_planned_by_it(tmp_path: Path):
    true = replace(TRUE, engine=replace(TRUE.engine, refill_s=0.006))
    widths = {n: observe(written(tmp_path / str(n), replace(true, num_slots=n))) for n in (4, 32)}
    found = learn(list(widths.values()), config=widths[4].config)
    assert found.engine.refill_s == pytest.approx(0.006, rel=0.05)
    assert found.engine.step_s == pytest.approx(0.004, rel=0.05)
    step_s = simulate(replace(true, num_slots=16)).step_s
    assert simulate(replace(found, num_slots=16)).step_s == pytest.approx(step_s, rel=0.03)
    one = learn([widths[32]], config=widths[32].config)
    assert one.engine.refill_s == pytest.approx(0.006, rel=0.1)


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_how_much_of_its_work_the_controller_does_at_issue_is_learned_again(tmp_path: Path, share: float):
    bursts = replace(LOADED, max_staleness=4, shared=replace(LOADED.shared, issue_share=share))
    run = observe(written(tmp_path / "bursts", bursts, num_steps=60))
    assert learn([run], config=run.config).shared.issue_share == pytest.approx(share, abs=0.05)


def test_where_every_step_issues_what_it_trains_half_of_the_work_is_at_issue(runs: dict[str, Path]):
    run = observe(runs["sync"])
    assert learn([run], config=run.config).shared.issue_share == 0.5


def test_a_run_of_an_older_version_is_refused_with_what_it_lacks(tmp_path: Path):
    path = written(tmp_path / "old", TRUE)
    metrics = RunFolder.open(path)[0].metrics_path
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "num_refills"}) + "\n" for r in records))
    with pytest.raises(CostsUnknown, match="lack num_refills"):
        observe(path)


@pytest.mark.parametrize(("waits", "counts"), [(True, True), (False, False)])
def test_a_step_that_waits_long_counts_and_one_that_works_long_does_not(tmp_path: Path, waits: bool, counts: bool):
    path = written(tmp_path / "run", TRUE)
    metrics = RunFolder.open(path)[0].metrics_path
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    long = records[15]
    busy_s = (1 - long["learner_idle"]) * long["step_s"]
    long["step_s"] *= 20
    long["learner_idle"] = 1 - busy_s / long["step_s"] if waits else 0.0
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert (long["step"] in [step["step"] for step in observe(path).steps]) == counts


def test_a_run_whose_engines_do_not_count_decode_steps_is_refused_by_name(tmp_path: Path):
    path = written(tmp_path / "served", TRUE)
    metrics = RunFolder.open(path)[0].metrics_path
    records = [json.loads(line) | {"mean_active": 0.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(CostsUnknown, match="give --costs FILE"):
        observe(path)


def test_a_plan_from_run_folders(runs: dict[str, Path], tmp_path: Path):
    sets = [f"--set=batch_size={TRUE.batch_size}", f"--set=group_size={TRUE.group_size}", "--set=max_staleness=2"]
    asked = CliRunner().invoke(app, ["plan", "--run", str(runs["sync"]), "--run", str(runs["async"]), "--json", *sets])
    assert asked.exit_code == 0, asked.output
    first, *_ = json.loads(asked.stdout)["options"]
    assert first["name"] == "as configured"
    assert first["step_s"] == pytest.approx(simulate(LOADED).step_s, rel=0.15)
    with pytest.raises(CostsUnknown, match="too few"):
        observe(written(tmp_path / "short", TRUE, num_steps=7))
