"""What methods whose zero sum holds per whole group refuse to train on."""

import torch
from torch import Tensor

from headway.algorithms import uncentered_groups
from headway.errors import HeadwayError
from headway.training.batching import Rows
from headway.types import Batch


class PartialGroup(HeadwayError, ValueError):
    """A method that is right over whole groups only was given one whose members lost all their tokens."""


def require_whole_groups(algorithm: str, batch: Batch, rows: Rows, advantages: Tensor) -> None:
    """Raises PartialGroup for a group whose baseline counts a member that the loss cannot see; advantages `[B]`.

    Members that are missing from the group are no fault: its advantages are centered over those that are there.
    """
    empty = ~rows.mask.any(1)
    if not empty.any():
        return
    values = advantages.unsqueeze(1).expand(rows.mask.shape)
    found = uncentered_groups(values, rows.mask, rows.group).tolist()
    if found:
        members = torch.nonzero(empty[rows.group == found[0]]).flatten().tolist()
        raise PartialGroup(
            f"group {batch.groups[found[0]].group_id}: members {members} have no token left to train, so its "
            f"advantages no longer sum to zero, which {algorithm} needs: give whole groups "
            '(over_bound = "wait" or "drop"), or take those members out, which centers the group again'
        )
