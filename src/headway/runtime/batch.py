"""The batch as the learner gets it, and what it says of staleness."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.staleness import OverBound, over_bound_tokens, spread, staleness_histogram, token_staleness
from headway.types import NO_VERSION, Batch, Group, Response


class BoundBroken(AssertionError):
    """A token would train beyond `max_staleness`: a fault of the runtime, never of the user."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch within the bound, and the accounts that the ledger wants of it."""

    batch: Batch
    num_masked: dict[tuple[int, int], int]
    """(group id, member) to number of tokens masked; only members that lost some."""
    token_staleness: Counter[int]
    """Staleness in versions to number of tokens that train."""


def prepare(
    groups: Sequence[Group], *, step: int, policy_version: int, max_staleness: int, over_bound: OverBound
) -> PreparedBatch:
    """Pure: enforce the bound token by token. `mask` hides tokens beyond it; otherwise one raises BoundBroken."""
    num_masked: dict[tuple[int, int], int] = {}
    kept: list[Group] = []
    for group in groups:
        responses = []
        for member, response in enumerate(group.responses):
            beyond = over_bound_tokens(response.versions, policy_version, max_staleness)
            if beyond.any():
                if over_bound != "mask":
                    raise BoundBroken(
                        f"group {group.group_id}, member {member}: token of version {response.oldest_version} "
                        f"at version {policy_version}, max_staleness = {max_staleness}"
                    )
                num_masked[group.group_id, member] = int(beyond.sum())
                response = _hide(response, beyond)
            responses.append(response)
        kept.append(replace(group, responses=tuple(responses)))
    batch = Batch(step=step, policy_version=policy_version, groups=tuple(kept))
    ages = staleness_histogram(token_staleness(r.versions, policy_version) for r in batch.responses)
    return PreparedBatch(batch, num_masked, ages)


def with_scores(groups: Sequence[Group], batch: Batch) -> dict[tuple[int, int], Response]:
    """The responses as they were finished, masked tokens included, with the proximal log-probs of the batch."""
    return {
        (group.group_id, member): replace(response, proximal_logprobs=scored.proximal_logprobs)
        for group, completed in zip(groups, batch.groups, strict=True)
        for member, (response, scored) in enumerate(zip(group.responses, completed.responses, strict=True))
    }


def _hide(response: Response, beyond: np.ndarray) -> Response:
    """Take tokens out of the loss; the reward stays, so the group's baseline does."""
    return replace(
        response,
        mask=response.mask & ~beyond,
        versions=np.where(beyond, np.int32(NO_VERSION), response.versions),
    )


def batch_metrics(prepared: PreparedBatch) -> dict[str, float]:
    """Staleness, lengths and rewards of a batch; each one is explained in docs/metrics.md."""
    batch = prepared.batch
    responses = batch.responses
    sampled = [r for r in responses if r.num_sampled]
    spreads = np.array([spread(r, batch.policy_version) for r in sampled] or [(0, 0)])
    ages = prepared.token_staleness
    num_tokens = sum(ages.values())
    rewards = np.array([r.reward for r in responses])
    kept = [r.side.kept_mass[r.mask] for r in responses if r.side.kept_mass is not None]
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_token_mean": sum(age * n for age, n in ages.items()) / max(1, num_tokens),
        "staleness_token_max": float(max(ages, default=0)),
        "staleness_sample_mean": float(spreads.sum(1).mean()),
        "d_intra": float(spreads[:, 0].mean()),
        "d_inter": float(spreads[:, 1].mean()),
        "mixed_version_fraction": float((spreads[:, 0] > 0).mean()),
        "num_tokens": float(num_tokens),
        "num_masked_tokens": float(sum(prepared.num_masked.values())),
        "response_tokens": float(np.mean([len(r.token_ids) for r in responses])),
        "truncated_fraction": float(np.mean([r.truncated for r in responses])),
        "turns": float(np.mean([r.num_turns for r in responses])),
        "kept_mass": float(np.concatenate(kept).mean()) if kept else 1.0,
    }
