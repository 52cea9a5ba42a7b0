"""`headway compare` on a small recorded run: what it says, that it only reads, and how it refuses."""

import json
from pathlib import Path

import pytest
from runs import headway, train

from headway.report.compare import direction_table, facts_of, floor_lines, weight_table
from headway.runtime.compare import CompareError, compare_run
from headway.runtime.methods import MethodError, choose_baseline, parse_methods
from headway.runtime.run_folder import RunFolder


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six asynchronous steps on record, with checkpoints of versions 0, 4 and 6."""
    run = tmp_path_factory.mktemp("compared") / "run"
    train(
        run,
        model,
        record=True,
        num_steps=6,
        checkpoint__every=4,
        evaluation__test_size=0,
        evaluation__every=0,
        task__name="length_task:ShortAnswers",
    )
    return run


def compared(run: Path, **options: object):
    chosen = {"algorithms": None, "steps": None, "baseline": None, "num_fresh": 2, "prompts": "same"} | options
    folder, config = RunFolder.open(run)
    return compare_run(folder, config, say=lambda message: None, **chosen)  # pyright: ignore[reportArgumentType]


def files_of(run: Path) -> dict[str, tuple[int, int]]:
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in run.rglob("*") if f.is_file()}


def test_the_command_compares_recorded_steps_and_only_reads(recorded: Path):
    before = files_of(recorded)
    result = headway(
        "compare",
        recorded,
        "--algorithms=grpo,sat,asympo,estr:tau=0.5",
        "--steps=2,5",
        "--fresh=2",
        "--json",
        "--no-plot",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert [(s["step"], s["policy_version"], s["checkpoint"]) for s in found["steps"]] == [(2, 2, 0), (5, 5, 4)]
    for step in found["steps"]:
        assert [a["algorithm"] for a in step["algorithms"]] == ["grpo", "sat", "asympo", "estr:tau=0.5"]
        assert [r["name"] for r in step["references"]] == [
            "grpo, seq_mean_token_mean",
            "grpo, token_mean",
            "centered, group_mean",
        ]
        assert step["algorithms"][0]["difference"] == 0
        drawn = [a["bootstrap"] for a in step["algorithms"] if a["bootstrap"] is not None]
        assert all(one["low"] <= one["mean"] <= one["high"] for one in drawn)
        assert all(a["grad_norm"] > 0 for a in step["algorithms"])
        assert all(-1 <= a["cosine"] <= 1 for a in step["algorithms"])
        assert direction_table(step, baseline="grpo").row_count == 7
        assert weight_table(step).row_count == len(step["algorithms"])
        assert "token staleness" in facts_of(step) and len(floor_lines(step)) == 3
    assert files_of(recorded) == before


def test_the_reconstructed_policy_gives_the_loss_and_the_gradient_that_training_logged(recorded: Path):
    """From version 0 with four batches in between, and from the checkpoint itself."""
    logged = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    steps = {r["step"]: r for r in logged if r["kind"] == "step"}
    found = compared(recorded, algorithms="grpo", steps="3,4")
    for step in found["steps"]:
        method = step["algorithms"][0]
        assert method["loss"] == pytest.approx(steps[step["step"]]["loss"], abs=1e-6)
        assert method["grad_norm"] == pytest.approx(steps[step["step"]]["grad_norm"], rel=1e-3)
        assert step["batch"]["mean_abs_delta"] == pytest.approx(steps[step["step"]]["mean_abs_delta"], rel=1e-3)


def test_a_comparison_repeats_itself_and_takes_the_newest_step_by_default(recorded: Path):
    one, two = (compared(recorded, algorithms="grpo,reinforce", prompts="further") for _ in range(2))
    assert one == two
    assert [s["step"] for s in one["steps"]] == [5]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"algorithms": "grpo,estrr"}, "unknown algorithm 'estrr'; did you mean 'estr'?"),
        ({"algorithms": "estr:tua=1"}, "estr has no parameter 'tua'; did you mean 'tau'?"),
        ({"algorithms": "estr:tau"}, "written name:key=value, got 'tau'"),
        ({"algorithms": "ppo_ewma"}, "needs averaged parameters"),
        ({"algorithms": "grpo,sat", "baseline": "satt"}, "did you mean 'sat'?"),
        ({"steps": "3,17"}, r"steps \[17\] are not on record; .* has 0 to 5"),
        ({"steps": "3,last"}, "steps are numbers with commas between them"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(recorded: Path, options: dict[str, object], complaint: str):
    with pytest.raises((CompareError, MethodError), match=complaint):
        compared(recorded, **options)


def test_a_run_without_recorded_batches_is_refused_on_the_command_line(recorded: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "identity.json"):
        (copy / name).write_bytes((recorded / name).read_bytes())
    result = headway("compare", copy, "--no-plot")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "holds no recorded batches; set record = true before the run" in " ".join(result.stderr.split())


def test_a_method_that_needs_what_was_not_recorded_is_refused_and_not_chosen(model: Path, tmp_path: Path):
    run = tmp_path / "run"
    train(
        run,
        model,
        record=True,
        num_steps=1,
        algorithm="asympo",
        engines__logprobs=False,
        evaluation__test_size=0,
        evaluation__every=0,
    )
    with pytest.raises(MethodError, match=r"grpo needs behavior_logprobs, which .* did not record"):
        compared(run, algorithms="grpo")
    _, config = RunFolder.open(run)
    methods = parse_methods(None, config)
    assert [m.label for m in methods] == ["asympo", "reinforce"]
    assert choose_baseline(methods, None, config) == "asympo"
    step = compared(run)["steps"][0]
    assert "ess_tokens" not in step["batch"] and "no behavior log-probs" in facts_of(step)


def test_the_comparison_takes_the_entropy_that_the_run_took(model: Path, tmp_path: Path):
    run = tmp_path / "run"
    train(
        run,
        model,
        record=True,
        num_steps=3,
        algorithm="estr",
        algorithm_params__tau=1e-4,
        behavior_entropy="learner",
        engines__round_weights="bfloat16",
        evaluation__test_size=0,
        evaluation__every=0,
        task__name="length_task:ShortAnswers",
    )
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (masked,) = (r["masked_fraction"] for r in logged if r["kind"] == "step" and r["step"] == 2)
    found = compared(run, algorithms="estr")
    assert found["behavior_entropy"] == "learner"
    assert found["steps"][0]["algorithms"][0]["metrics"]["masked_fraction"] == pytest.approx(masked)


def test_methods_of_whole_groups_are_refused_where_training_refuses_them(recorded: Path):
    _, config = RunFolder.open(recorded)
    masking = config.model_copy(update={"over_bound": "mask"})
    with pytest.raises(MethodError, match=r'asympo needs whole groups, but the run has over_bound = "mask"'):
        parse_methods("grpo,asympo", masking)
    assert "asympo" not in [method.label for method in parse_methods(None, masking)]
