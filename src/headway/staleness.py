"""Staleness, defined once: version being trained − version that sampled the oldest token, when it is consumed.

Pure integer arithmetic. The runtime and the planner drive the same `Admission`; docs/staleness.md has the proof.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Literal, get_args

import numpy as np

from headway.types import Bools, Ints, Response

OverBound = Literal["wait", "drop", "mask"]
"""What happens to a sample that would be consumed beyond the bound.

`wait`: it never happens, the learner waits for the slow ones first. `drop`: the whole group is dropped and counted.
`mask`: tokens beyond the bound leave the loss, the reward stays in the group's baseline.
"""


def capacity(max_staleness: int, groups_per_step: int) -> int:
    """Most groups that may be generating or ready at once: (S + 1) · B."""
    return (max_staleness + 1) * groups_per_step


def token_staleness(versions: Ints, policy_version: int) -> Ints:
    """policy_version − version, per token, in versions. Tokens no policy sampled (version −1) are left out."""
    return policy_version - versions[versions >= 0]


def over_bound_tokens(versions: Ints, policy_version: int, max_staleness: int) -> Bools:
    """True on sampled tokens older than the bound: policy_version − version > S. Same shape as `versions`."""
    return (versions >= 0) & (policy_version - versions > max_staleness)


def spread(response: Response, policy_version: int) -> tuple[int, int]:
    """(D_intra, D_inter) of a response in versions: newest − oldest token, and version trained − newest token."""
    newest = response.newest_version
    return newest - response.oldest_version, policy_version - newest


class Admission:
    """Says when a group may be issued and which groups make the next batch, so that the bound S cannot break.

    A group's *deadline* is the last version that may train it: its oldest version + S. While it generates, the
    version its engine held at issue stands for the oldest one, which it bounds from below.

    Under `wait` one invariant is kept (v = version the learner holds, B = groups a step):

        for every version d ≥ v:  #{pending groups with deadline ≤ d} ≤ (d − v + 1) · B

    Each step takes B groups, so the invariant says that all of them fit before their deadlines; d = v + S makes it
    the capacity (S + 1)·B. Issue keeps it (`may_issue`), and a batch leaves only if the rest still keeps it for
    v + 1 (`next_batch`): otherwise the learner waits for the groups whose deadlines press. They are generating, so
    they arrive, and with nothing pending a group may always be issued: no deadlock for any S ≥ 0.

    `max_ready_batches`: issue also pauses while that many whole batches wait, for what waits only ages. A learner that
    outruns the engines never meets this limit. None leaves the bound alone to limit.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        over_bound: OverBound = "wait",
        max_ready_batches: int | None = None,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be ≥ 0, got {max_staleness} (0 is synchronous training)")
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be ≥ 1, got {groups_per_step}: no step could ever fill a batch")
        if over_bound not in get_args(OverBound):
            raise ValueError(f"over_bound must be one of {', '.join(get_args(OverBound))}, got {over_bound!r}")
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        if max_ready_batches is not None and max_ready_batches < 1:
            raise ValueError(
                f"max_ready_batches must be ≥ 1 or None, got {max_ready_batches}: no batch could ever fill"
            )
        self.over_bound: OverBound = over_bound
        self._max_ready = max_ready_batches * groups_per_step if max_ready_batches else self.capacity
        self._deadlines: Counter[int] = Counter()
        self._generating: dict[int, int] = {}
        self._ready: dict[int, dict[int, None]] = {}
        self._num_ready = 0

    @property
    def capacity(self) -> int:
        """Most groups pending at once: (S + 1) · B."""
        return capacity(self.max_staleness, self.groups_per_step)

    @property
    def num_generating(self) -> int:
        return len(self._generating)

    @property
    def num_ready(self) -> int:
        return self._num_ready

    @property
    def num_pending(self) -> int:
        """Groups issued and not yet consumed: generating + ready."""
        return self.num_generating + self.num_ready

    def may_issue(self, *, policy_version: int, engine_version: int) -> bool:
        """Whether one more group may start on an engine that holds `engine_version`."""
        deadline = engine_version + self.max_staleness
        if deadline < policy_version or self.num_pending >= self.capacity or self.num_ready >= self._max_ready:
            return False
        return self.over_bound != "wait" or self._fits(self._deadlines, policy_version, extra=deadline)

    def issue(self, group_id: int, *, engine_version: int) -> None:
        """A group starts generating."""
        if group_id in self._generating:
            raise ValueError(f"group {group_id} is already generating")
        self._generating[group_id] = engine_version + self.max_staleness
        self._deadlines[self._generating[group_id]] += 1

    def ready(self, group_id: int, *, oldest_version: int) -> None:
        """A group is whole; its real oldest version may grant a later deadline than its issue did."""
        issued_until = self._generating.pop(group_id)
        # Never before what it was issued for, not even if the bound was lowered meanwhile.
        deadline = max(issued_until, oldest_version + self.max_staleness)
        self._forget(issued_until)
        self._deadlines[deadline] += 1
        self._ready.setdefault(deadline, {})[group_id] = None
        self._num_ready += 1

    def remove(self, group_id: int) -> None:
        """A group that will not be trained leaves: failed while generating, or dropped when ready."""
        if group_id in self._generating:
            self._forget(self._generating.pop(group_id))
        else:
            self._take([group_id])

    def is_sampled(self, engine_version: int, *, demand_met: bool) -> bool:
        """Whether engines may take new weights; with a bound alone always."""
        return True

    def tighten(self, max_staleness: int) -> None:
        """Lower the bound of groups issued from now on; those under way keep their deadlines, so (★) still holds."""
        if not 0 <= max_staleness <= self.max_staleness:
            raise ValueError(f"a bound of {self.max_staleness} can only be lowered, to 0 at least, not {max_staleness}")
        self.max_staleness = max_staleness

    def expired(self, policy_version: int) -> list[int]:
        """Ready groups that no batch may take any more (`drop` only), oldest deadline first."""
        if self.over_bound != "drop":
            return []
        return [g for d in sorted(self._ready) if d < policy_version for g in self._ready[d]]

    def next_batch(self, policy_version: int) -> list[int] | None:
        """Take B ready groups, earliest deadline first, sorted by id; None if the learner must wait."""
        if self._num_ready < self.groups_per_step:
            return None
        # Counts first: the planner asks after every group of thousands, and most answers are no.
        chosen: dict[int, int] = {}
        missing = self.groups_per_step
        for deadline in sorted(self._ready):
            if self.over_bound == "drop" and deadline < policy_version:
                continue
            chosen[deadline] = min(missing, len(self._ready[deadline]))
            missing -= chosen[deadline]
        if missing:
            return None
        rest = Counter(self._deadlines)
        rest.subtract(chosen)
        if self.over_bound == "wait" and not self._fits(rest, policy_version + 1):
            return None
        taken = [group for deadline, number in chosen.items() for group in islice(self._ready[deadline], number)]
        self._take(taken)
        return sorted(taken)

    def pressing(self, policy_version: int) -> list[int]:
        """Generating groups with the earliest deadline: whom a waiting learner waits for."""
        earliest = min(self._generating.values(), default=policy_version)
        return [g for g, deadline in self._generating.items() if deadline == earliest]

    def _fits(self, deadlines: Counter[int], policy_version: int, extra: int | None = None) -> bool:
        due = 0
        for deadline in sorted(deadlines.keys() | ({extra} if extra is not None else set())):
            due += deadlines[deadline] + (deadline == extra)
            if due > max(0, deadline - policy_version + 1) * self.groups_per_step:
                return False
        return True

    def _take(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            deadline = next((d for d, groups in self._ready.items() if group_id in groups), None)
            if deadline is None:
                raise KeyError(f"group {group_id} is neither generating nor ready")
            del self._ready[deadline][group_id]
            if not self._ready[deadline]:
                del self._ready[deadline]
            self._num_ready -= 1
            self._forget(deadline)

    def _forget(self, deadline: int) -> None:
        self._deadlines[deadline] -= 1
        if not self._deadlines[deadline]:
            del self._deadlines[deadline]


class ExactLag(Admission):
    """Makes staleness a controlled variable: the batch of version v was sampled by version max(0, v − lag) alone.

    Version 0 samples lag + 1 batches, every later version one. Engines may take a new version only when the one they
    hold has sampled its share (`is_sampled`), so no response holds tokens of two versions. A group that fails is
    replaced by another of the same version.
    """

    def __init__(self, *, lag: int, groups_per_step: int) -> None:
        super().__init__(max_staleness=lag, groups_per_step=groups_per_step)
        self._issued: Counter[int] = Counter()

    def may_issue(self, *, policy_version: int, engine_version: int) -> bool:
        """Whether `engine_version` has not yet started all the groups of its share."""
        return self._issued[engine_version] < self._share(engine_version)

    def issue(self, group_id: int, *, engine_version: int) -> None:
        super().issue(group_id, engine_version=engine_version)
        self._issued[engine_version] += 1

    def remove(self, group_id: int) -> None:
        if group_id in self._generating:
            self._issued[self._generating[group_id] - self.max_staleness] -= 1
        super().remove(group_id)

    def is_sampled(self, engine_version: int, *, demand_met: bool) -> bool:
        """Whether every group of this version's share is whole, or no more are wanted."""
        share_issued = self._issued[engine_version] >= self._share(engine_version)
        return not self._generating and (demand_met or share_issued)

    def tighten(self, max_staleness: int) -> None:
        """Raises ValueError unless nothing changes: the lag is what the run is about."""
        if max_staleness != self.max_staleness:
            raise ValueError("an exact lag cannot be lowered; set guard.action to warn or off")

    def _share(self, engine_version: int) -> int:
        return self.groups_per_step if engine_version else self.capacity


def staleness_histogram(values: Iterable[np.ndarray]) -> Counter[int]:
    """How many tokens had each staleness, over many arrays of `token_staleness`."""
    counts: Counter[int] = Counter()
    for array in values:
        ages, numbers = np.unique(array, return_counts=True)
        counts.update(dict(zip(ages.tolist(), numbers.tolist(), strict=True)))
    return counts
