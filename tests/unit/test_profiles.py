"""Token profiles count what they say, whatever the padding, and several steps add up."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from headway.algorithms.profiles import DELTA_EDGES, ENTROPY_EDGES, OFFSETS, delta_at_switches, delta_by_entropy
from headway.training.batching import collate
from headway.training.profiles import token_profiles
from headway.types import Batch, Group, Prompt, Response

BOUNDARIES: dict[str, Any] = {"tau": 1.6, "entropy_floor": 0.01, "clip": 0.2}


def random_tokens(seed: int, shape: tuple[int, int] = (6, 40)) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(shape, generator=generator)
    return {
        "logprobs": behavior + torch.randn(shape, generator=generator) * 0.3,
        "behavior_logprobs": behavior,
        "behavior_entropy": torch.rand(shape, generator=generator) ** 4 * 4,
        "mask": torch.rand(shape, generator=generator) < 0.7,
    }


def test_every_sampled_token_is_in_its_bin_and_beyond_the_boundaries_it_is_beyond():
    tokens = random_tokens(0)
    found = delta_by_entropy(**tokens, **BOUNDARIES)
    mask = tokens["mask"]
    size = (tokens["logprobs"] - tokens["behavior_logprobs"]).abs()[mask].tolist()
    entropy = tokens["behavior_entropy"][mask].tolist()
    num = torch.zeros(len(ENTROPY_EDGES), len(DELTA_EDGES), dtype=torch.long)
    outside_estr, outside_clip = [0] * len(ENTROPY_EDGES), [0] * len(ENTROPY_EDGES)
    for h, d in zip(entropy, size, strict=True):
        row = max(i for i, edge in enumerate(ENTROPY_EDGES) if h >= edge)
        num[row, max(i for i, edge in enumerate(DELTA_EDGES) if d >= edge)] += 1
        outside_estr[row] += d * d / (h + 0.01) > 1.6
        outside_clip[row] += d > math.log(1.2)
    assert torch.equal(found["num"], num)
    assert found["outside_estr"].tolist() == outside_estr and sum(outside_estr) > 0
    assert found["outside_clip"].tolist() == outside_clip
    assert float(found["sum_abs_delta"].sum()) == pytest.approx(sum(size), rel=1e-6)


def test_masked_tokens_count_nowhere_even_if_they_hold_nan():
    tokens = random_tokens(1)
    clean = delta_by_entropy(**tokens, **BOUNDARIES)
    for name in ("logprobs", "behavior_logprobs", "behavior_entropy"):
        tokens[name] = torch.where(tokens["mask"], tokens[name], torch.nan)
    for name, value in delta_by_entropy(**tokens, **BOUNDARIES).items():
        assert torch.equal(value, clean[name])


def test_values_around_a_switch_are_found_by_hand():
    versions = torch.tensor([[0, 0, -1, 1, 1, 1]])
    mask = versions >= 0  # a tool token lies between the last of version 0 and the first of version 1
    delta = torch.tensor([[0.1, -0.2, 9.0, 0.3, 0.4, 0.5]])
    entropy = torch.arange(6.0).unsqueeze(0)
    found = delta_at_switches(delta, torch.zeros(1, 6), entropy, versions, mask)
    at = {offset: i for i, offset in enumerate(OFFSETS)}
    assert {o: int(found["num"][i]) for o, i in at.items() if found["num"][i]} == {-2: 1, -1: 1, 0: 1, 1: 1, 2: 1}
    assert float(found["sum_abs_delta"][at[-1]]) == pytest.approx(0.2)
    assert float(found["sum_abs_delta"][at[0]]) == pytest.approx(0.3)
    assert float(found["sum_entropy"][at[0]]) == 3.0


def test_the_end_of_one_response_and_the_start_of_the_next_are_no_switch():
    versions = torch.tensor([[0, 0, 0], [1, 1, 1]])
    zeros = torch.zeros(2, 3)
    assert not delta_at_switches(zeros, zeros, zeros, versions, torch.ones(2, 3))["num"].any()
    nothing = delta_at_switches(zeros, zeros, zeros, versions, torch.zeros(2, 3))
    assert nothing["num"].tolist() == [0] * len(OFFSETS)


def response(versions: list[int], *, entropy: bool = True) -> Response:
    num = len(versions)
    return Response(
        token_ids=np.arange(num, dtype=np.int32),
        mask=np.ones(num, np.bool_),
        versions=np.array(versions, np.int32),
        reward=1.0,
        behavior_logprobs=np.full(num, -1.0, np.float32),
        behavior_entropy=np.full(num, 0.5, np.float32) if entropy else None,
    )


def profiles_of(*responses: Response) -> dict:
    prompt = Prompt(0, "train", np.arange(2, dtype=np.int32))
    rows = collate(Batch(1, 1, (Group(0, prompt, responses),)), pad_id=0)
    return token_profiles(rows, torch.full(rows.input_ids.shape, -1.5), **BOUNDARIES)


def test_a_step_without_switches_or_without_entropy_has_no_such_profile():
    assert set(profiles_of(response([0, 0]), response([1, 1, 1]))) == {"delta_by_entropy"}
    both = profiles_of(response([0, 1]), response([1, 1, 1]))
    assert sum(map(sum, both["delta_by_entropy"]["num"])) == 5
    assert both["delta_at_switches"]["sum_abs_delta"][OFFSETS.index(0)] == pytest.approx(0.5)
    assert profiles_of(response([0, 1], entropy=False)) == {}
