"""Whole runs: what a user sees, and what the ledger and the replay prove of them."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_moving, headway, ledger, records, train, train_arguments
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.algorithms import QUADRANTS
from headway.report.cards import report
from headway.report.run_data import read_runs
from headway.runtime.recording import read_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One asynchronous run with its batches on record, looked at by several tests."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    train(run, model, record=True, report__sinks=["tensorboard"])
    assert_moving(run)
    return run


def test_every_sample_is_trained_once_and_within_the_bound(recorded: Path):
    audit = ledger(recorded)
    assert audit["samples"]["trained"] == audit["samples_issued"] == 8 * 16
    assert audit["samples_in_flight"] == 0
    assert max(map(int, audit["token_staleness"])) <= 2


def test_every_response_that_began_or_ended_counts_in_one_step(recorded: Path):
    steps = records(recorded, "step")
    assert sum(step["num_started"] for step in steps) == sum(step["num_finished"] for step in steps) == 8 * 16
    assert steps[0]["num_started"] > 16 and steps[-1]["num_started"] == 0  # ahead at first, and not beyond the demand


def test_books_that_were_changed_do_not_add_up_and_the_command_fails(recorded: Path, tmp_path: Path):
    for name in ("config.toml", "identity.json", "ledger.sqlite"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE counters SET value = value + 1 WHERE name = 'samples_issued'")
    shown, plain = headway("ledger", tmp_path), headway("ledger", tmp_path, "--json")
    assert shown.returncode == plain.returncode == 1
    assert "The accounts do not add up" in shown.stdout
    facts = json.loads(plain.stdout)
    assert not facts["ok"] and facts["samples_issued"] == 8 * 16 + 1


def test_the_logged_spread_of_versions_is_that_of_the_batches(recorded: Path):
    for step in records(recorded, "step"):
        batch = read_batch(recorded / "batches", step["step"])
        newest = np.array([r.newest_version for r in batch.responses])
        oldest = np.array([r.oldest_version for r in batch.responses])
        assert step["d_intra"] == np.mean(newest - oldest)
        assert step["d_inter"] == np.mean(step["policy_version"] - newest)


def test_a_recorded_run_replays_bit_by_bit_with_no_engine(recorded: Path):
    result = headway("replay", recorded)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "replayed 8 steps; checkpoints of versions 6, 8: bit-identical" in result.stdout


def test_a_replay_notices_other_parameters(recorded: Path, tmp_path: Path):
    import shutil

    from safetensors.torch import save_file

    copy = shutil.copytree(recorded, tmp_path / "copy")
    file = copy / "checkpoints" / "version-000008" / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[0] += 1e-7
    save_file(tensors, file, metadata={"format": "pt"})
    result = headway("replay", copy)
    assert result.returncode == 1
    assert "DIFFERENT at versions [8]" in result.stdout


def test_the_final_checkpoint_loads_in_transformers(recorded: Path):
    directory = recorded / "checkpoints" / "version-000008"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    saved = load_file(directory / "model.safetensors")
    assert torch.equal(loaded.state_dict()["model.embed_tokens.weight"], saved["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(directory).decode([3]) == "0"


def test_evaluations_are_attributed_to_one_version_and_repeatable(recorded: Path):
    seen = {(e["split"], e["policy_version"]): e["accuracy"] for e in records(recorded, "evaluation")}
    assert set(seen) == {("test", 0), ("validation", 3), ("validation", 6), ("test", 8)}
    result = headway("eval", recorded, "--size=8", "--json")
    assert f'"accuracy": {seen["test", 8]}' in result.stdout


def test_the_report_finds_in_a_run_what_its_plots_ask_for(recorded: Path):
    """Plots that a run of this algorithm has nothing for say so; every other one is drawn."""
    found = report(read_runs([recorded]))
    empty = {card["key"] for section in found["sections"] for card in section["cards"] if not card["figures"]}
    # Whether a new version lands inside a response is a matter of time.
    is_mixed = any("delta_at_switches" in step for step in records(recorded, "step"))
    assert empty == {"factors"} | (set() if is_mixed else {"switches"})
    assert found["runs"][0]["problems"] == []


def test_a_sink_that_the_settings_name_gets_every_step(recorded: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(next(recorded.rglob("events.out.tfevents*")).parent)).Reload()
    sent = [(event.step, event.value) for event in events.Scalars("train/reward")]
    kept = [(step["step"], step["reward"]) for step in records(recorded, "step")]
    assert [step for step, _ in sent] == [step for step, _ in kept]
    np.testing.assert_allclose([value for _, value in sent], [value for _, value in kept], rtol=1e-6)


def test_every_logged_metric_is_documented(recorded: Path):
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([^`]+)`", page))
    documented |= {name.replace("<quadrant>", quadrant) for name in documented for quadrant in QUADRANTS}
    logged = {name for kind in ("step", "evaluation") for record in records(recorded, kind) for name in record}
    assert logged - documented == set()


def test_engines_tell_decode_steps_from_those_that_requests_join(recorded: Path):
    steps = records(recorded, "step")
    assert all(sum(step[name] for step in steps) > 0 for name in ("num_refills", "num_decode_steps"))
    assert all(0 < step["decode_step_s"] < step["step_s"] for step in steps if step["num_decode_steps"])


def test_synchronous_training_has_no_stale_token_and_repeats_itself(model: Path, tmp_path: Path):
    for name in ("one", "two"):
        # One request at a time: log-probs of requests that are decoded together are rounded together.
        train(tmp_path / name, model, max_staleness=0, num_steps=4, engines__num_slots=1)
        assert_moving(tmp_path / name)
        assert ledger(tmp_path / name)["token_staleness"].keys() == {"0"}
    one, two = (
        load_file(tmp_path / n / "checkpoints" / "version-000004" / "model.safetensors") for n in ("one", "two")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["asympo", "spo"])
def test_current_policy_methods_need_no_logprobs_of_the_engine(algorithm: str, model: Path, tmp_path: Path):
    train(tmp_path / "run", model, algorithm=algorithm, engines__logprobs=False, num_steps=3)
    assert ledger(tmp_path / "run")["samples"]["trained"] == 3 * 16
    assert_moving(tmp_path / "run")
    assert "mean_abs_delta" not in records(tmp_path / "run", "step")[0]


@pytest.mark.parametrize("on_update", ["recompute", "interrupt"])
def test_weights_change_in_flight_and_responses_may_hold_several_versions(on_update: str, model: Path, tmp_path: Path):
    train(
        tmp_path / "run",
        model,
        engines__on_update=on_update,
        engines__num_slots=2,
        sampling__max_response_tokens=12,
        num_steps=6,
        weights="disk",
    )
    assert max(map(int, ledger(tmp_path / "run")["token_staleness"])) <= 2
    assert_moving(tmp_path / "run")
    assert any(step["d_intra"] > 0 for step in records(tmp_path / "run", "step"))


def test_engines_may_serve_rounded_weights_and_the_metrics_show_the_discrepancy(model: Path, tmp_path: Path):
    said = train(tmp_path / "run", model, engines__round_weights="int8", num_steps=2).stdout
    before, _ = said.split("starting 1 torch engine")
    for fact in ("responses per step │ 16", "capacity, groups │ 12", "most response tokens in flight │ 144"):
        assert fact in " ".join(before.split())
    first = records(tmp_path / "run", "step")[0]
    assert first["staleness_token_max"] == 0 and first["mean_abs_delta"] > 1e-4


@pytest.mark.parametrize("policy", ["drop", pytest.param("mask", marks=pytest.mark.runs)])
def test_slow_samples_are_dropped_or_masked_as_asked_and_accounted_for(policy: str, model: Path, tmp_path: Path):
    train(
        tmp_path / "run",
        model,
        over_bound=policy,
        max_staleness=1,
        task__latency_s=0.3,
        engines__num_engines=2,
        num_steps=12,
        evaluation__every=0,
        evaluation__test_size=0,
    )
    audit = ledger(tmp_path / "run")
    assert max(map(int, audit["token_staleness"])) <= 1
    gone = audit["samples"]["dropped"] if policy == "drop" else audit["tokens"]["masked"]
    assert gone > 0


def refused(tmp_path: Path, model: Path, **overrides: object) -> str:
    """What a run that must not start says; it may leave no sample behind."""
    result = headway(*train_arguments(tmp_path / "run", model, **overrides))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr, result.stderr
    assert not (tmp_path / "run" / "ledger.sqlite").exists()
    return result.stderr


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"algorithm": "gropo"}, "unknown algorithm 'gropo'; did you mean 'grpo'?"),
        ({"algorithm_params__eps_hi": 0.3}, "grpo has no parameter 'eps_hi'; did you mean 'eps_high'?"),
        ({"algorithm_params__eps_high": "abc"}, "grpo: eps_high is 'abc', but must be a number"),
        ({"algorithm_params__reduction": "tokn_mean"}, "tokn_mean"),
        ({"algorithm": "mis", "algorithm_params__level": "tokn"}, "tokn"),
        ({"engines__logprobs": False}, "needs log-probs"),
        ({"engine": "vllm", "engines__round_weights": "int8"}, 'engine = "vllm" serves the weights as they are'),
        ({"engines__url": "http://127.0.0.1:1"}, "the built-in engine has none"),
        ({"proximal": "ewma"}, "'grpo' has no proximal policy"),
        ({"algorithm": "asympo", "over_bound": "mask"}, 'over_bound = "mask" takes tokens out'),
        ({"task__name": "adition"}, "did you mean 'addition'?"),
        ({"task__options__digit": 2}, "did you mean 'digits'?"),
        ({"engines__max_length": 5}, "set it to at least 7"),
        ({"batch_size": 18}, "set batch_size to 16 or 20"),
        ({"model__path": "./nowhere"}, "no model folder at ./nowhere"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_it_starts(overrides, complaint, model: Path, tmp_path: Path):
    assert complaint in " ".join(refused(tmp_path, model, **overrides).split())


def test_an_environment_that_always_raises_stops_the_run_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_task.py").write_text(
        "from headway.envs.addition import Addition\n"
        "class Broken(Addition):\n"
        "    def start(self, prompt):\n"
        "        raise OSError('the tool is down')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = headway(
        *train_arguments(tmp_path / "run", model, task__name="broken_task:Broken", evaluation__test_size=0)
    )
    assert result.returncode == 1
    assert "groups failed in a row" in result.stderr and "the tool is down" in result.stderr
    audit = ledger(tmp_path / "run")
    assert audit["samples"]["dropped"] > 0 and audit["samples"]["trained"] == 0


def test_an_exact_lag_trains_every_token_that_many_versions_late(model: Path, tmp_path: Path):
    train(tmp_path / "run", model, exact_lag=True, max_staleness=2, num_steps=5)
    ages = [set(step["token_staleness"]) for step in records(tmp_path / "run", "step")]
    assert ages == [{"0"}, {"1"}, {"2"}, {"2"}, {"2"}]
    assert_moving(tmp_path / "run")
