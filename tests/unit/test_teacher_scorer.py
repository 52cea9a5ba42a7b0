"""A teacher's scores are those of each sequence alone, whatever shares its row or its batch."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headway.models.tiny import tiny_model
from headway.teacher.messages import Score
from headway.teacher.packing import pack
from headway.teacher.scorer import Scorer, batches, rows_of

torch.set_num_threads(1)

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def scorer(model: PreTrainedModel, **options: int) -> Scorer:
    options = {"student_vocab_size": 57, "batch_tokens": 4096} | options
    return Scorer(model, temperature=TEMPERATURE, autocast=torch.float32, **options)


def requests(num_top: int = 0) -> list[Score]:
    """Three prompts; the first has three responses of unlike length, one asks for other ids."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 57, n).astype(np.int32) for n in (4, 7, 1)]
    found = []
    for id, (prompt, length) in enumerate([(0, 5), (1, 3), (0, 2), (2, 6), (0, 1)]):
        tokens = np.concatenate([prompts[prompt], rng.integers(3, 57, length).astype(np.int32)])
        width = 3 if id == 3 else 2
        found.append(Score(id, tokens, rng.integers(0, 57, (length, width)).astype(np.int32), num_top))
    return found


@torch.no_grad()
def expected(model: PreTrainedModel, request: Score) -> torch.Tensor:
    logits = model(torch.from_numpy(request.token_ids).long()[None]).logits[0]
    return (logits / TEMPERATURE).log_softmax(-1)[-len(request.query_ids) - 1 : -1]


@pytest.mark.parametrize("batch_tokens", [1, 14, 4096])
def test_scores_are_those_of_each_sequence_alone(model: PreTrainedModel, batch_tokens: int):
    asked = requests()
    for request, scores in zip(asked, scorer(model, batch_tokens=batch_tokens).score(asked), strict=True):
        wanted = expected(model, request).gather(-1, torch.from_numpy(request.query_ids).long())
        np.testing.assert_allclose(scores.logprobs, wanted, atol=2e-5)
        assert scores.top_ids is None


def test_the_top_is_most_likely_first_and_leaves_padding_rows_out(model: PreTrainedModel):
    asked = requests(num_top=4)
    for request, scores in zip(asked, scorer(model, student_vocab_size=30).score(asked), strict=True):
        values, ids = expected(model, request)[:, :30].topk(4)
        assert scores.top_logprobs is not None
        np.testing.assert_array_equal(scores.top_ids, ids)
        np.testing.assert_allclose(scores.top_logprobs, values, atol=2e-5)


def test_responses_to_one_prompt_share_a_row_and_rows_fit_the_budget():
    asked = requests()
    rows = rows_of(asked, range(5), most_tokens=10)
    assert sorted(i for row in rows for i in row.requests) == list(range(5))
    assert [row.requests for row in rows if len(row.prompt) == 4] == [(0,), (2, 4)]
    for part in batches(rows, 10):
        assert len(part) == 1 or len(part) * max(row.num_tokens for row in part) <= 10


def test_a_packed_response_sees_its_prompt_and_itself_only():
    packed = pack([(np.array([5, 6], np.int32), [np.array([7, 8], np.int32), np.array([9], np.int32)])])
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.attention[0, 0, 4].tolist() == [True, True, False, False, True]
    assert packed.predicting.tolist() == [[0, 1], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    ("token_ids", "query_ids", "num_top", "reason"),
    [
        ([1, 2], [[1], [2]], 0, "2 positions to score in 2 tokens"),
        ([1, 57], [[1]], 0, "token ids 1…57 leave the teacher's vocabulary of 57"),
        ([1, 2], [[-1]], 0, "queried ids -1…-1 leave"),
        ([1, 2], [[1]], 60, "num_top = 60 of a vocabulary of 57"),
        ([1] * 2049, [[1]], 0, "2049 tokens are more than the teacher's 2048 positions"),
    ],
)
def test_requests_it_cannot_serve_are_refused_by_name(
    model: PreTrainedModel, token_ids: list, query_ids: list, num_top: int, reason: str
):
    request = Score(0, np.array(token_ids, np.int32), np.array(query_ids, np.int32), num_top)
    assert reason in str(scorer(model).refusal(request))
