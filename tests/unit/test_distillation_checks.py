"""What a distillation config is refused for, before any process starts."""

from typing import Any

import pytest

from headway.config import ConfigError, parse_config
from headway.runtime.checks import check_losses
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
    assert "group_size = 1" in refusal(distill={"reward_weight": 1.0}, group_size=1)


def test_vocabularies_must_agree_id_by_id_and_padding_rows_are_free():
    ours = {"<eos>": 0, "a": 1, "b": 2}
    check_vocabulary(ours, dict(ours), teacher_rows=64, teacher_name="big")
    with pytest.raises(OtherVocabulary, match=r"2 tokens differ, first 'a' \(id 1 for the student, 2 for"):
        check_vocabulary(ours, {"<eos>": 0, "a": 2, "b": 1}, teacher_name="big")
    with pytest.raises(OtherVocabulary, match="'c' \\(id none for the student, 3 for the teacher\\)"):
        check_vocabulary(ours, ours | {"c": 3}, teacher_name="big")
    with pytest.raises(OtherVocabulary, match="a head of 2 rows, but the vocabulary reaches id 2"):
        check_vocabulary(ours, dict(ours), teacher_rows=2, teacher_name="big")
