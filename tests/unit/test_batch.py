"""The batch as the learner gets it: the bound token by token, and what it says of staleness."""

import numpy as np
import pytest

from headway.runtime.batch import BoundBroken, batch_metrics, prepare
from headway.staleness import spread
from headway.types import Group, Prompt, Response


def response(versions: list[int], reward: float = 1.0) -> Response:
    """−1 stands for a token of a tool."""
    array = np.array(versions, np.int32)
    return Response(
        token_ids=np.arange(len(array), dtype=np.int32),
        mask=array >= 0,
        versions=array,
        reward=reward,
        behavior_logprobs=np.full(len(array), -1.5, np.float32),
    )


def group(*responses: Response) -> Group:
    return Group(3, Prompt(0, "train", np.array([7], np.int32)), responses)


def test_a_token_beyond_the_bound_is_a_fault_that_names_its_sample():
    fitting, late = group(response([5, 6])), group(response([5, 6]), response([5, -1, 4]))
    prepare([fitting], step=8, policy_version=7, max_staleness=2, over_bound="wait")
    for policy in ("wait", "drop"):
        with pytest.raises(BoundBroken, match=r"group 3, member 1: token of version 4 at version 7, max_staleness = 2"):
            prepare([late], step=8, policy_version=7, max_staleness=2, over_bound=policy)


def test_masked_tokens_leave_the_loss_and_keep_their_reward_in_the_baseline():
    members = (response([6, 7]), response([3, -1, 4, 6], reward=0.0), response([3, 4], reward=0.25))
    whole = group(*members)
    found = prepare([whole], step=8, policy_version=7, max_staleness=2, over_bound="mask")
    kept, cut, gone = found.batch.groups[0].responses
    assert kept is members[0]
    assert cut.mask.tolist() == [False, False, False, True] and cut.versions.tolist() == [-1, -1, -1, 6]
    assert not gone.mask.any()
    assert [r.reward for r in found.batch.responses] == [1.0, 0.0, 0.25]
    assert np.array_equal(cut.token_ids, members[1].token_ids)
    assert found.num_masked == {(3, 1): 2, (3, 2): 2}
    assert dict(found.token_staleness) == {0: 1, 1: 2}
    assert members[1].mask.tolist() == [True, False, True, True], "what was finished stays as it was"


def test_the_spread_of_a_response_is_within_it_and_since_it():
    assert spread(response([4, -1, 4]), 4) == (0, 0)
    assert spread(response([2, 2, -1, 5]), 9) == (3, 4)


def test_a_batch_reports_the_mean_spread_of_its_responses():
    groups = [group(response([4, 4]), response([2, 3, 5])), group(response([5]), response([1, 5]))]
    facts = batch_metrics(prepare(groups, step=6, policy_version=6, max_staleness=5, over_bound="wait"))
    assert facts["d_intra"] == (0 + 3 + 0 + 4) / 4 and facts["d_inter"] == (2 + 1 + 1 + 1) / 4
    assert facts["staleness_sample_mean"] == facts["d_intra"] + facts["d_inter"]
    assert facts["mixed_version_fraction"] == 0.5
    assert facts["staleness_token_max"] == 5 and facts["staleness_token_mean"] == pytest.approx(19 / 8)
