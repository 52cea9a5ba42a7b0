"""Responses, groups and steps for tests of the ledger."""

import numpy as np

from headway.ledger import Ledger
from headway.types import Response, SideData


def response(versions: tuple[int, ...] = (0, 0, 1), reward: float = 1.0) -> Response:
    """One sampled token per version, and a tool token in front."""
    num = len(versions)
    return Response(
        token_ids=np.arange(num + 1, dtype=np.int32),
        mask=np.array([False] + [True] * num),
        versions=np.array([-1, *versions], np.int32),
        reward=reward,
        behavior_logprobs=np.linspace(-1, 0, num + 1, dtype=np.float32),
        side=SideData(draw_ids=np.ones((num + 1, 2), np.int32)),
    )


def staleness(policy_version: int, *responses: Response) -> dict[int, int]:
    ages = policy_version - np.concatenate([r.versions[r.mask] for r in responses])
    return {int(age): int(num) for age, num in zip(*np.unique(ages, return_counts=True), strict=True)}


def add_ready(ledger: Ledger, group_id: int, **kwargs) -> None:
    ledger.issue(group_id, 0)
    for member in range(ledger.group_size):
        ledger.finish(group_id, member, response(**kwargs))


def train(ledger: Ledger, step: int, *group_ids: int) -> None:
    """Step `step` of version `step + 1` over groups made by `add_ready`."""
    ages = staleness(step + 1, *[response()] * (ledger.group_size * len(group_ids)))
    ledger.commit_step(step, step + 1, group_ids, token_staleness=ages)
