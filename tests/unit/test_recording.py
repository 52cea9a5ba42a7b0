"""Recorded batches that decode but cannot be what was trained on are refused with the file and the sample named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.runtime.recording import BundleError, read_batch, recorded_steps, write_batch
from headway.training.batching import UnknownToken, UnlikeOrigins, check_origins, check_vocabulary
from headway.types import Batch, Group, LogprobOrigin, Prompt, Response


def batch() -> Batch:
    response = Response(
        token_ids=np.array([3, 2], np.int32),
        mask=np.ones(2, np.bool_),
        versions=np.zeros(2, np.int32),
        reward=1.0,
        behavior_logprobs=np.zeros(2, np.float32),
    )
    prompt = Prompt(index=0, split="train", token_ids=np.array([4], np.int32))
    return Batch(step=1, policy_version=1, groups=(Group(5, prompt, (response,)),))


def test_a_batch_comes_back_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write_batch(tmp_path, batch())
    (tmp_path / "step-copy.msgpack").write_bytes(b"")
    assert list(recorded_steps(tmp_path)) == [1]
    assert read_batch(tmp_path, 1).groups[0].group_id == 5


def test_a_bundle_of_another_schema_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.recording.BUNDLE_SCHEMA", 7)
    write_batch(tmp_path, batch())
    monkeypatch.undo()
    with pytest.raises(BundleError, match=r"step-000001.* has bundle schema 7; this Headway reads 1"):
        read_batch(tmp_path, 1)


ORIGIN = LogprobOrigin("behavior", "torch", "float32", temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("origins", "complaint"),
    [
        ((ORIGIN, ORIGIN), ""),
        ((ORIGIN, replace(ORIGIN, engine="vllm")), ""),
        ((replace(ORIGIN, temperature=1.0),), r"group 5, member 0: log-probs at temperature 1.0, .* at 0.7"),
        ((ORIGIN, replace(ORIGIN, dtype="bfloat16")), r"member 1: log-probs \(.*bfloat16.*\), others \(.*float32"),
        ((ORIGIN, replace(ORIGIN, top_p=1.0)), r"member 1: log-probs \(.*1.0, 0\), others \(.*0.9, 0\)"),
        ((ORIGIN, replace(ORIGIN, top_k=5)), r"member 1: log-probs \(.*0.9, 5\), others \(.*0.9, 0\)"),
        ((ORIGIN, replace(ORIGIN, role="proximal")), r"member 1: log-probs \('proximal'"),
    ],
)
def test_log_probs_of_unlike_origins_are_refused(origins: tuple[LogprobOrigin, ...], complaint: str) -> None:
    group = batch().groups[0]
    responses = tuple(replace(group.responses[0], origin=origin) for origin in origins)
    taken = replace(batch(), groups=(replace(group, responses=responses),))
    if not complaint:
        check_origins(taken, temperature=0.7)
        return
    with pytest.raises(UnlikeOrigins, match=complaint):
        check_origins(taken, temperature=0.7)


def test_arrays_of_another_length_than_the_tokens_are_refused(tmp_path: Path) -> None:
    whole = batch()
    short = replace(whole.groups[0].responses[0], behavior_logprobs=np.zeros(1, np.float32))
    write_batch(tmp_path, replace(whole, groups=(replace(whole.groups[0], responses=(short,)),)))
    with pytest.raises(BundleError, match=r"step-000001.* group 5, member 0 has behavior_logprobs for 1 of 2 tokens"):
        read_batch(tmp_path, 1)


def test_log_probs_of_some_responses_only_are_refused(tmp_path: Path) -> None:
    whole = batch()
    first = whole.groups[0].responses[0]
    responses = (first, replace(first, behavior_logprobs=None))
    write_batch(tmp_path, replace(whole, groups=(replace(whole.groups[0], responses=responses),)))
    with pytest.raises(BundleError, match=r"step-000001.* some of its responses have behavior_logprobs and others"):
        read_batch(tmp_path, 1)


@pytest.mark.parametrize(("prompt", "response"), [([4], [3, 9]), ([-1], [3, 2])])
def test_a_token_that_the_model_does_not_know_is_named(prompt: list[int], response: list[int]) -> None:
    group = batch().groups[0]
    asked = replace(group.prompt, token_ids=np.array(prompt, np.int32))
    answer = replace(group.responses[0], token_ids=np.array(response, np.int32))
    check_vocabulary(batch(), 5)
    with pytest.raises(UnknownToken, match=r"group 5: token (9|-1) lies outside the model's vocabulary of 5"):
        check_vocabulary(replace(batch(), groups=(replace(group, prompt=asked, responses=(answer,)),)), 5)


def test_a_file_of_another_step_and_a_batch_of_nothing_are_refused(tmp_path: Path) -> None:
    write_batch(tmp_path, batch())
    (tmp_path / "step-000001.msgpack").rename(tmp_path / "step-000002.msgpack")
    with pytest.raises(BundleError, match="it holds step 1"):
        read_batch(tmp_path, 2)
    write_batch(tmp_path, replace(batch(), groups=()))
    with pytest.raises(BundleError, match="no groups"):
        read_batch(tmp_path, 1)
