"""What a distillation config is refused for, before any process starts."""

from pathlib import Path
from typing import Any

import pytest

from headway.algorithms import DISTILLATIONS
from headway.config import ConfigError, parse_config
from headway.models.loading import save_causal_lm
from headway.models.tiny import character_tokenizer, tiny_model
from headway.runtime.checks import check_losses
from headway.runtime.task import Task, open_environment
from headway.runtime.teachers import check_teacher
from headway.teacher.vocabulary import OtherVocabulary, check_vocabulary


def refusal(**settings: Any) -> str:
    distill = {"teacher": "some/model"} | settings.pop("distill", {})
    with pytest.raises(ConfigError) as failure:
        check_losses(parse_config({"distill": distill, **settings}))
    return str(failure.value)


SERVER = {"teacher": "http://127.0.0.1:8000", "served_model": "big", "tokenizer": "some/model"}


def test_methods_are_named_or_refused_with_the_reason():
    assert "did you mean 'mc_recomputed'?" in refusal(distill={"method": "mc_recompute"})
    assert "zero expected gradient" in refusal(distill={"method": "topk_kl_advantage"})
    assert "has no parameter 'clpi'; did you mean 'clip'?" in refusal(
        distill={"method": "mc_clipped", "params": {"clpi": [0.1, 0.1]}}
    )
    assert 'sglang" makes no extra draws' in refusal(engine="sglang")
    assert "needs log-probs of the policy that sampled" in refusal(engines={"logprobs": False})


@pytest.mark.parametrize("method", DISTILLATIONS)
def test_every_method_passes_with_its_defaults(method: str):
    check_losses(parse_config({"distill": {"teacher": "some/model", "method": method}}))


@pytest.mark.parametrize(
    ("method", "params", "reason"),
    [
        ("mc_clipped", {"clip": 0.2}, "clip is 0.2, but must be 2 numbers, such as [0.2, 0.2]"),
        ("mc_clipped", {"clip": [0.2]}, "clip is [0.2], but must be 2 numbers, such as [0.2, 0.2]"),
        ("mc_clipped", {"clip": [0.2, "no"]}, "clip is [0.2, 'no'], but must be 2 numbers, each a number"),
        ("mc_clipped", {"clip": [-0.5, 0.2]}, "clip is [-0.5, 0.2], but must be 2 numbers, each from 0 to inf"),
        ("mc_decoupled", {"cap": 0}, "cap is 0, but must be a number above 0"),
        ("mc_decoupled", {"cap": [5.0]}, "cap is [5.0], but must be a number"),
        ("mc_decoupled", {"cap": 0.5}, "mc_decoupled would not even learn from draws that its own student just made"),
        ("mc_m2po", {"budget": -1}, "budget is -1, but must be from 0 to inf"),
    ],
)
def test_values_that_no_loss_can_use_are_refused_by_name(method: str, params: dict[str, Any], reason: str):
    said = refusal(distill={"method": method, "params": params})
    assert reason in said and "distill.params" in said


def test_tight_but_meaningful_values_pass():
    for method, params in (
        ("mc_clipped", {"clip": [0, 0]}),
        ("mc_clipped", {"clip": [0.2, 2**70]}),
        ("mc_decoupled", {"cap": 1}),
        ("mc_m2po", {"budget": 0}),
    ):
        check_losses(parse_config({"distill": {"teacher": "some/model", "method": method, "params": params}}))


def test_decoupling_at_another_policy_than_the_one_at_hand_is_refused():
    joint = {"reward_weight": 0.5, "method": "mc_decoupled"}
    said = refusal(distill=joint, algorithm="decoupled_ppo", proximal="exact_snapshot")
    assert 'proximal = "exact_snapshot"; set proximal = "train_start", or distill.method = "mc_recomputed"' in said
    check_losses(parse_config({"distill": {"teacher": "some/model", **joint}, "algorithm": "decoupled_ppo"}))


@pytest.mark.parametrize("url", ["http://host:abc", "http://host:99999", "https://", "http://[::1"])
def test_what_is_no_url_is_refused_by_name(url: str):
    assert f"distill.teacher = {url!r}: " in (said := refusal(distill=SERVER | {"teacher": url, "num_draws": 1}))
    assert "write http://HOST:PORT" in said


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "returns no log-probs of chosen ids"),
        ({"method": "reverse_kl_student_topk"}, "returns no log-probs of chosen ids"),
        ({"num_draws": 1, "temperature": 0.7}, "distill.temperature must be 1"),
        ({"num_draws": 1, "tokenizer": ""}, "distill.tokenizer is empty"),
        ({"num_draws": 1, "served_model": ""}, "distill.served_model is empty"),
    ],
)
def test_a_server_can_feed_only_what_it_returns(settings: dict[str, Any], reason: str):
    assert reason in refusal(distill=SERVER | settings)


def test_what_a_server_can_feed_passes():
    for settings in ({"num_draws": 1}, {"method": "forward_kl_teacher_topk", "top_k": 20}):
        check_losses(parse_config({"distill": SERVER | settings}))


def test_the_algorithm_matters_only_where_reward_is_learned_from():
    check_losses(parse_config({"distill": {"teacher": "some/model"}, "group_size": 1, "algorithm": "nonsense"}))
    told = refusal(distill={"reward_weight": 1.0}, group_size=1)
    assert "group_size = 1" in told and "distill.reward_weight = 0" in told


def test_vocabularies_must_agree_id_by_id_and_padding_rows_are_free():
    ours = {"<eos>": 0, "a": 1, "b": 2}
    check_vocabulary(ours, dict(ours), teacher_rows=64, teacher_name="big")
    with pytest.raises(OtherVocabulary, match=r"2 tokens differ, first 'a' \(id 1 for the student, 2 for"):
        check_vocabulary(ours, {"<eos>": 0, "a": 2, "b": 1}, teacher_name="big")
    with pytest.raises(OtherVocabulary, match="'c' \\(id none for the student, 3 for the teacher\\)"):
        check_vocabulary(ours, ours | {"c": 3}, teacher_name="big")
    with pytest.raises(OtherVocabulary, match="a head of 2 rows, but the vocabulary reaches id 2"):
        check_vocabulary(ours, dict(ours), teacher_rows=2, teacher_name="big")


@pytest.mark.parametrize("device", ["", "banana", "meta", "cuda:x", "cuda:99", "cpu:0"])
def test_a_device_that_is_not_there_is_refused_before_a_teacher_fails_on_it(device: str):
    assert f'distill.device = "{device}": ' in refusal(distill={"device": device})


def test_a_url_of_another_scheme_is_not_taken_for_a_model():
    assert "begins with neither of http://, https://" in refusal(distill={"teacher": "HTTP://host:1"})


def test_a_device_of_another_node_is_left_to_ray():
    check_losses(parse_config({"distill": {"teacher": "some/model", "device": "cuda"}, "runtime": "ray"}))


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("num_draws", 10**9, "at most 4096"),
        ("timeout_s", 1e300, "at most 1000000"),
        ("latency_s", 1e300, "at most 1000000"),
        ("temperature", 1e-300, "at least 0.001"),
    ],
)
def test_numbers_that_no_machine_bears_are_refused_with_the_bound(key: str, value: float, bound: str):
    with pytest.raises(ConfigError, match=f"distill.{key}: .*{bound}"):
        parse_config({"distill": {"teacher": "some/model", key: value}})


def test_a_teacher_whose_folder_is_gone_is_refused_as_that(tmp_path: Path):
    student = save_causal_lm(tiny_model(), character_tokenizer(), tmp_path / "student")
    gone = str(tmp_path / "gone")
    config = parse_config({"distill": {"teacher": gone}})
    task = Task(open_environment(config, character_tokenizer()), character_tokenizer(), str(student), str, gone)
    with pytest.raises(ConfigError, match=r"distill\.teacher = .*gone': no model folder at .*give a folder with"):
        check_teacher(config, task)
