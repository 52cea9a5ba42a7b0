"""A study's file, its runs' outcomes and what they come to over seeds."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

pytest.importorskip("scipy")

from headway.config import ConfigError, RunConfig, load_config
from headway.report.jsonl import JsonlSink, read_records
from headway.runtime import study as study_runs
from headway.runtime import trials
from headway.runtime.checks import check_losses
from headway.runtime.run_folder import RunFolder
from headway.runtime.trials import Job, _conclude, ending, run_all
from headway.study.design import Study, Trial, load_study
from headway.study.outcome import Ending, Outcome, read_outcome
from headway.study.results import Results
from headway.study.statistics import estimate, summarize
from headway.study.tables import failures, study_table, to_json

FILE = """
goal = 0.7
[base]
num_steps = 12
optimizer.schedule = "constant"
[grid]
algorithm = ["grpo", "estr"]
optimizer.lr = [3e-4, 1e-3]
seed = [0, 1, 2]
"""


def study(tmp_path: Path, text: str) -> Study:
    (tmp_path / "study.toml").write_text(text)
    return load_study(tmp_path / "study.toml")


def test_a_grid_is_expanded_over_a_base_with_seeds_slowest(tmp_path: Path):
    found = study(tmp_path, FILE)
    assert [trial.name for trial in found.trials[:5]] == [
        *("grpo-lr0.0003-seed0", "grpo-lr0.001-seed0", "estr-lr0.0003-seed0", "estr-lr0.001-seed0"),
        "grpo-lr0.0003-seed1",
    ]
    assert len(found.trials) == 12
    last = found.trials[-1].config
    assert (last.algorithm, last.optimizer.lr, last.seed, last.num_steps) == ("estr", 1e-3, 2, 12)


def test_only_and_exclude_choose_combinations(tmp_path: Path):
    chosen = study(tmp_path, FILE + '[[exclude]]\nalgorithm = "estr"\noptimizer.lr = [1e-3]\n').trials
    assert len(chosen) == 9 and not any("estr-lr0.001" in trial.name for trial in chosen)
    chosen = study(tmp_path, FILE + '[[only]]\nalgorithm = "estr"\n[[only]]\nseed = 0\n').trials
    assert len(chosen) == 8
    with pytest.raises(ConfigError, match="no combination"):
        study(tmp_path, FILE + "[[exclude]]\nseed = [0, 1, 2]\n")


def test_a_config_file_is_what_the_base_overrides(tmp_path: Path):
    (tmp_path / "run.toml").write_text("num_steps = 99\nbatch_size = 64\n")
    config = study(tmp_path, 'config = "run.toml"\n' + FILE).trials[0].config
    assert (config.num_steps, config.batch_size) == (12, 64)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gaol = 0.7\n[grid]\nseed = [0]", "unknown key 'gaol'; did you mean 'goal'"),
        ("[base]\nnum_stepz = 3\n[grid]\nseed = [0]", "unknown key 'num_stepz'; did you mean 'num_steps'"),
        ("[grid]\noptimizer.lrr = [0.1]", "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'"),
        ("[grid]\nseed = 3", "grid.seed must be a list"),
        ("[grid]\nseed = []", "grid.seed must be a list"),
        ("[grid]\nseed = [1, 1]", "holds a value twice"),
        ("[grid]\nmax_staleness = [0, -1]\nseed = [0, 1]", r"max_staleness.*-1(.|\n)*-1-seed0 and 1 more"),
        ("[grid]\nseed = [0]\n[[only]]\nsede = 0", "only: 'sede' is no key of the grid; did you mean 'seed'"),
        ("[grid]\nseed = [0]\n[[exclude]]\nseed = 4", r"exclude: seed = 4 is not in the grid's \[0\]"),
        ('[grid]\nalgorithm = ["grpo"]\n[baseline]\nalgorithm = "spo"', "baseline: algorithm = 'spo' is not in"),
        ("[grid]\nseed = [0, 1]\n[baseline]\nseed = 0", "baseline: seed cannot be compared"),
        ('[grid]\nalgorithm = ["grpo", "spo"]\n[baseline]\nalgorithm = ["grpo"]', "one value, not a list"),
        ('[grid]\nalgorithm = ["grpo"]\n[baseline]\nalgorithm = "grpo"', "that of all combinations"),
        (
            '[grid]\nalgorithm = ["grpo", "spo"]\n[baseline]\nalgorithm = "grpo"\n[[exclude]]\nalgorithm = "grpo"',
            "that of none of the combinations",
        ),
        ("[base]\nseed = 1", r"grid: expected a table \(it is missing\)"),
        ("[base]\nmodel = 3\n[grid]\nmodel.path = ['a']", "'model' is a value, not a table"),
    ],
)
def test_whatever_is_wrong_in_a_file_is_refused_with_the_mend(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        study(tmp_path, text)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "studies").glob("*.toml")), ids=lambda p: p.name)
def test_the_studies_that_come_along_are_valid_and_have_three_seeds(path: Path):
    found = load_study(path)
    assert len(found.axes["seed"]) >= 3 and found.baseline is not None
    for trial in found.trials:
        check_losses(trial.config)


def evaluation(version: int, accuracy: float, split: str = "validation", num_prompts: int = 100) -> dict:
    return {
        "kind": "evaluation",
        "policy_version": version,
        "split": split,
        "accuracy": accuracy,
        "num_prompts": num_prompts,
    }


def steps(rewards: list[float]) -> list[dict]:
    return [
        {"kind": "step", "step": i, "reward": r, "staleness_token_mean": float(i), "step_s": 2.0}
        for i, r in enumerate(rewards)
    ]


def test_an_outcome_sums_up_a_run():
    records = [
        evaluation(0, 0.6, "test", 300),
        *steps([0.5] * 20),
        evaluation(10, 0.8),
        evaluation(20, 0.7),
        evaluation(20, 0.9, "test", 300),
    ]
    found = read_outcome(records, load_config(None, ["num_steps=20"]), goal=0.75, finished=True)
    assert (found.start, found.end, found.best) == (0.6, pytest.approx(0.85), pytest.approx(0.85))
    assert found.area == pytest.approx((0.7 * 10 + 0.825 * 10) / 20)
    assert (found.steps_to_goal, found.seconds_to_goal, found.seconds) == (10, 18.0, 40.0)
    assert not found.collapsed and found.staleness == pytest.approx(12.0) and found.ess is None
    lost = read_outcome([*records, evaluation(25, 0.1)], load_config(None, ["num_steps=25"]), goal=0.75, finished=True)
    assert lost.collapsed and lost.collapsed_at == 25
    diverged = read_outcome(records, load_config(None, ["num_steps=25"]), goal=0.99, finished=False)
    assert (diverged.end, diverged.best) == (0.0, pytest.approx(0.85))
    assert diverged.area == pytest.approx((0.7 * 10 + 0.825 * 10) / 25)
    assert diverged.collapsed_at == 20 and diverged.steps_to_goal is None and diverged.seconds_to_goal is None


def test_time_to_the_goal_leaves_out_starts_and_is_unknown_where_a_step_of_it_is(tmp_path: Path):
    config = load_config(None, ["num_steps=6"])
    timed = [step | {"step_s": 2.0, "elapsed_s": 2.0 * (i + 1)} for i, step in enumerate(steps([0.5] * 6))]
    timed[0] |= {"step_s": 30.0, "elapsed_s": 30.0}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*timed[:4], evaluation(4, 0.9)]))
    with closing(JsonlSink(path, resume_at=2)) as sink:  # killed after step 3; the checkpoint holds two steps
        for step in (2, 3):
            sink.log({"kind": "step", "step": step, "redone": True, "reward": 0.5})
        sink.log(timed[4] | {"step_s": 50.0, "elapsed_s": 50.0})  # with the start of the new process
        sink.log(timed[5] | evaluation(6, 0.95))
    again = list(read_records(path))
    assert read_outcome(again, config, goal=0.8, finished=True).seconds_to_goal == 6.0
    assert read_outcome(again, config, goal=0.95, finished=True).seconds_to_goal is None  # step 5 is not on record
    lost = [{k: v for k, v in r.items() if k != "step_s"} if r.get("step") == 2 else r for r in again]
    assert read_outcome(lost, config, goal=0.8, finished=True).seconds_to_goal is None


def outcome(end: float, *, reached: int | None = None, collapsed: bool = False) -> Outcome:
    return Outcome(
        start=0.6,
        end=end,
        best=end,
        area=end,
        steps_to_goal=reached,
        seconds_to_goal=None if reached is None else 2.0 * reached,
        collapsed_at=5 if collapsed else None,
        reward=end,
        staleness=1.0,
        ess=None,
        k3=None,
        cosine=None,
        seconds=10.0,
        curve={0: 0.6, 12: end},
    )


def test_the_interval_is_students():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5)
    assert estimate([1.0]).low is None


@pytest.mark.parametrize(
    ("reached", "middle"),
    [((8, 10), 9), ((8, None), None), ((8, 10, None), 10), ((8, 10, 12, None), 11), ((None,), None)],
)
def test_the_time_to_a_score_is_the_median_of_all_runs_also_of_even_numbers(
    tmp_path: Path, reached: tuple[int | None, ...], middle: float | None
):
    found = study(tmp_path, FILE.replace("seed = [0, 1, 2]", f"seed = {list(range(len(reached)))}"))
    outcomes = {f"grpo-lr0.0003-seed{seed}": outcome(0.5, reached=at) for seed, at in enumerate(reached)}
    cell = next(c for c in summarize(found, outcomes) if c.settings == {"algorithm": "grpo", "optimizer.lr": 3e-4})
    assert cell.steps_to_goal == middle


def test_cells_sum_up_seeds_and_differences_are_taken_seed_by_seed(tmp_path: Path):
    found = study(tmp_path, FILE + '[baseline]\nalgorithm = "grpo"\n')
    outcomes: dict[str, Outcome | None] = {
        f"grpo-lr0.0003-seed{seed}": outcome(0.5 + 0.1 * seed, reached=[6, 12, None][seed]) for seed in range(3)
    }
    outcomes |= {f"estr-lr0.0003-seed{seed}": outcome(0.6 + 0.1 * seed, collapsed=seed == 0) for seed in range(3)}
    outcomes["estr-lr0.001-seed0"] = None
    cells = {(c.settings["algorithm"], c.settings["optimizer.lr"]): c for c in summarize(found, outcomes)}
    grpo, estr, failed = cells["grpo", 3e-4], cells["estr", 3e-4], cells["estr", 1e-3]
    assert grpo.difference is None and (grpo.steps_to_goal, grpo.num_reached) == (12, 2)
    assert estr.difference is not None and estr.difference.mean == pytest.approx(0.1)
    assert estr.difference.low == pytest.approx(0.1)  # the same in every seed, though the seeds differ among them
    assert (estr.num_collapsed, estr.num_runs, estr.steps_to_goal) == (1, 3, None)
    assert (failed.num_runs, failed.num_failed, failed.measures) == (0, 1, {})
    endings = {name: Ending("finished" if run else "failed") for name, run in outcomes.items()}
    facts = json.loads(json.dumps(to_json(found, list(cells.values()), endings, outcomes)))
    assert len(facts["cells"]) == 4 and len(facts["runs"]) == 7 and "collapsed when" in facts["rule_of_collapse"]
    assert study_table(found, list(cells.values())).row_count == 4


def test_a_baseline_that_equals_a_value_of_the_grid_is_that_value(tmp_path: Path):
    found = study(tmp_path, "[grid]\nmax_staleness = [0, 4]\nseed = [0]\n[baseline]\nmax_staleness = 0.0\n")
    _, stale = summarize(found, {"max_staleness0-seed0": outcome(0.5), "max_staleness4-seed0": outcome(0.4)})
    assert stale.difference is not None and stale.difference.mean == pytest.approx(-0.1)


def test_failed_runs_are_named_with_the_way_on():
    assert failures({"a": Ending("finished"), "b": Ending("diverged")}) is None
    said = failures({"a": Ending("failed", "exit 1"), "b": Ending("finished")})
    assert said is not None and "1 failed (a)" in said and "--retry" in said and "train.log" in said


def test_a_run_that_finished_after_all_is_not_failed_for_good(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", load_config(None, ["num_steps=3", "evaluation.test_size=0"]))
    (folder.path / "failed").write_text("exit 1: in use by process 7\n")
    assert ending(folder.path) == Ending("failed", "exit 1: in use by process 7")
    folder.checkpoint(3).mkdir(parents=True)
    assert ending(folder.path) == Ending("finished")


def test_a_run_killed_before_its_last_evaluation_has_not_ended(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", load_config(None, ["num_steps=3"]))
    folder.checkpoint(3).mkdir(parents=True)
    record = {"kind": "evaluation", "split": "validation", "policy_version": 3}
    folder.metrics_path.write_text(json.dumps(record) + "\n")
    assert ending(folder.path) is None
    folder.metrics_path.write_text(json.dumps(record | {"split": "test"}) + "\n")
    assert ending(folder.path) == Ending("finished")


def test_a_process_that_met_a_run_at_work_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(tmp_path / "run", load_config(None, ["num_steps=3", "evaluation.test_size=0"]))
    folder = RunFolder.create(job.path, job.config)
    ended: list[Ending] = []

    locks: list[IO[str]] = []

    def start(job: Job) -> SimpleNamespace:  # in between, the run of a killed study has taken the lock
        locks.append(folder.lock())
        polls = iter([None, 1])
        return SimpleNamespace(job=job, process=SimpleNamespace(poll=lambda: next(polls), returncode=1))

    def tick(active: Sequence[Job]) -> None:
        if locks and not active:  # and finishes
            folder.checkpoint(3).mkdir(parents=True)
            locks.pop().close()

    monkeypatch.setattr(trials, "_start", start)
    monkeypatch.setattr(trials, "_TICK_S", 0.0)
    run_all([job], num_parallel=1, on_end=lambda _, end: ended.append(end), on_tick=tick)
    assert ended == [Ending("finished")] and not (job.path / "failed").exists()


def test_the_laws_warnings_are_said_once_for_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def law(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
        say("fitted with other settings")
        return config

    monkeypatch.setattr(study_runs, "apply_law", law)
    monkeypatch.setattr(study_runs, "_check", lambda *_: None)
    said: list[str] = []
    study_runs.check_study(study(tmp_path, "[grid]\nseed = [0, 1, 2]\n"), tmp_path / "out", say=said.append)
    assert said == ["fitted with other settings"]


def test_the_table_holds_a_row_a_run_and_replaces_one_with_other_columns(tmp_path: Path):
    trial = Trial("a-seed0", {"seed": 0}, load_config(None))
    with closing(sqlite3.connect(tmp_path / "results.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE runs (name TEXT PRIMARY KEY, something)")
    for reason in ("first", "again"):
        results = Results(tmp_path / "results.sqlite")
        results.put(trial, Ending("failed", reason), None)
        results.put(trial, Ending("finished"), outcome(0.7, collapsed=True))
    with closing(sqlite3.connect(tmp_path / "results.sqlite")) as connection:
        rows = connection.execute('SELECT name, state, "end", collapsed, collapsed_at, curve FROM runs').fetchall()
    assert rows == [("a-seed0", "finished", 0.7, 1, 5, '{"0": 0.6, "12": 0.7}')]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("error: step 3: gradient norm is nan, the 6th in a row", "diverged"),
        ("error: parameter 'lm_head' of version 9 is not finite, so it is not saved", "diverged"),
        ("error: request 7: the model's output at position 4 is not finite under weights version 9", "diverged"),
        ("error: step 3: logprobs of group 3 is nan, as the policy being trained gave it (1 such values)", "diverged"),
        ("error: [Errno 28] No space left on device", "failed"),
    ],
)
def test_a_run_that_ends_on_numbers_that_are_not_finite_has_diverged(tmp_path: Path, said: str, state: str):
    (tmp_path / "train.log").write_text(said + "\n")
    ended = SimpleNamespace(job=SimpleNamespace(path=tmp_path), process=SimpleNamespace(returncode=1))
    assert _conclude(ended).state == state  # pyright: ignore[reportArgumentType]
    assert (tmp_path / state).is_file()
