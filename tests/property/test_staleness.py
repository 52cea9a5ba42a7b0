"""The bound under arbitrary interleavings: the scheduler of the runtime is driven by hypothesis."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.staleness import Admission, ExactLag, over_bound_tokens, token_staleness


class World:
    """A learner, engines that lag, and groups that take arbitrarily long; every choice is drawn."""

    def __init__(self, admission: Admission, data: st.DataObject) -> None:
        self.admission, self.data = admission, data
        self.version = self.engine_version = self.next_group = 0
        self.issue_version: dict[int, int] = {}
        self.oldest: dict[int, int] = {}
        self.consumed: list[tuple[int, int]] = []
        self.dropped: list[int] = []

    def moves(self) -> list[str]:
        moves = []
        if self.engine_version < self.version:
            moves.append("sync")
        if self.admission.may_issue(policy_version=self.version, engine_version=self.engine_version):
            moves.append("issue")
        if self.issue_version:
            moves.append("finish")
        if self.admission.num_ready:
            moves.append("train")
        return moves

    def move(self, name: str) -> bool:
        return getattr(self, name)()

    def sync(self) -> bool:
        self.engine_version = self.data.draw(st.integers(self.engine_version + 1, self.version))
        return True

    def issue(self) -> bool:
        self.admission.issue(self.next_group, engine_version=self.engine_version)
        self.issue_version[self.next_group] = self.engine_version
        self.next_group += 1
        return True

    def finish(self) -> bool:
        group = self.data.draw(st.sampled_from(sorted(self.issue_version)))
        # The request may have waited in the engine's queue across updates before its first token.
        oldest = self.data.draw(st.integers(self.issue_version.pop(group), self.engine_version))
        self.oldest[group] = oldest
        self.admission.ready(group, oldest_version=oldest)
        return True

    def train(self) -> bool:
        for group in self.admission.expired(self.version):
            self.admission.remove(group)
            self.dropped.append(group)
        batch = self.admission.next_batch(self.version)
        if batch is None:
            return False
        assert len(set(batch)) == self.admission.groups_per_step
        self.consumed += [(group, self.version) for group in batch]
        self.version += 1
        return True

    def check_slots(self) -> None:
        pending = self.next_group - len(self.consumed) - len(self.dropped)
        assert self.admission.num_pending == pending <= self.admission.capacity
        assert len({g for g, _ in self.consumed} | set(self.dropped)) == len(self.consumed) + len(self.dropped)


bounds = st.integers(0, 5)
batches = st.integers(1, 4)
policies = st.sampled_from(["wait", "drop", "mask"])
ready_limits = st.sampled_from([None, 1, 2])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), max_staleness=bounds, groups_per_step=batches, policy=policies, ready=ready_limits)
def test_no_interleaving_breaks_the_bound_or_loses_a_slot(data, max_staleness, groups_per_step, policy, ready):
    world = World(
        Admission(
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            over_bound=policy,
            max_ready_batches=ready,
        ),
        data,
    )
    for _ in range(data.draw(st.integers(1, 80))):
        world.move(data.draw(st.sampled_from(world.moves())))
        world.check_slots()
    if policy != "mask":
        assert all(0 <= version - world.oldest[group] <= max_staleness for group, version in world.consumed)
    if policy != "drop":
        assert not world.dropped


@settings(max_examples=150, deadline=None)
@given(data=st.data(), max_staleness=bounds, groups_per_step=batches, policy=policies, ready=ready_limits)
def test_the_schedule_never_deadlocks(data, max_staleness, groups_per_step, policy, ready):
    """Whatever happened before, if engines sync and groups finish, the learner gets its batch."""
    world = World(
        Admission(
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            over_bound=policy,
            max_ready_batches=ready,
        ),
        data,
    )
    for _ in range(data.draw(st.integers(0, 40))):
        world.move(data.draw(st.sampled_from(world.moves())))
    start = world.version
    for _ in range(10 * world.admission.capacity + 10):
        if "train" in world.moves() and world.train():
            break
        others = [m for m in world.moves() if m != "train"]
        assert others, "nobody can move"
        world.move(data.draw(st.sampled_from(others)))
    assert world.version > start


@settings(max_examples=60, deadline=None)
@given(data=st.data(), groups_per_step=batches)
def test_zero_staleness_trains_every_token_on_the_version_that_sampled_it(data, groups_per_step):
    world = World(Admission(max_staleness=0, groups_per_step=groups_per_step), data)
    for _ in range(60):
        world.move(data.draw(st.sampled_from(world.moves())))
    assert all(version == world.oldest[group] for group, version in world.consumed)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_exactly_s_plus_one_batches_fit_and_not_one_group_more(bound):
    admission = Admission(max_staleness=bound, groups_per_step=3)
    for group in range((bound + 1) * 3):
        assert admission.may_issue(policy_version=0, engine_version=0)
        admission.issue(group, engine_version=0)
    assert not admission.may_issue(policy_version=0, engine_version=0)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_lagging_engine_may_start_groups_up_to_the_bound_and_not_beyond(bound):
    admission = Admission(max_staleness=bound, groups_per_step=1)
    assert admission.may_issue(policy_version=bound, engine_version=0)
    assert not admission.may_issue(policy_version=bound + 1, engine_version=0)


def test_issuing_pauses_while_a_whole_batch_waits_and_goes_on_once_it_is_taken():
    admission = Admission(max_staleness=4, groups_per_step=2, max_ready_batches=1)
    for group in range(4):
        admission.issue(group, engine_version=0)
    admission.ready(0, oldest_version=0)
    assert admission.may_issue(policy_version=0, engine_version=0)
    admission.ready(1, oldest_version=0)
    assert not admission.may_issue(policy_version=0, engine_version=0)
    assert admission.next_batch(0) == [0, 1]
    assert admission.may_issue(policy_version=1, engine_version=0)


def test_a_learner_waits_for_the_group_whose_deadline_presses():
    admission = Admission(max_staleness=1, groups_per_step=1)
    admission.issue(0, engine_version=0)
    admission.issue(1, engine_version=0)
    admission.ready(1, oldest_version=0)
    assert admission.next_batch(0) == [1]
    admission.issue(2, engine_version=1)
    admission.ready(2, oldest_version=1)
    assert admission.next_batch(1) is None
    assert admission.pressing(1) == [0]
    admission.ready(0, oldest_version=0)
    assert admission.next_batch(1) == [0]


def test_drop_gives_up_a_group_past_its_deadline_and_names_it():
    admission = Admission(max_staleness=0, groups_per_step=1, over_bound="drop")
    admission.issue(0, engine_version=0)
    admission.ready(0, oldest_version=0)
    assert admission.expired(0) == []
    assert admission.expired(1) == [0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_staleness": -1, "groups_per_step": 1}, "max_staleness must be ≥ 0"),
        ({"max_staleness": 0, "groups_per_step": 0}, "no step could ever fill a batch"),
        ({"max_staleness": 0, "groups_per_step": 1, "max_ready_batches": 0}, "no batch could ever fill"),
        ({"max_staleness": 0, "groups_per_step": 1, "over_bound": "reject"}, "wait, drop, mask"),
    ],
)
def test_a_configuration_that_cannot_progress_is_refused_with_the_reason(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Admission(**arguments)


def test_tool_tokens_have_no_staleness_and_are_never_over_bound():
    versions = np.array([3, -1, 5], np.int32)
    assert token_staleness(versions, 7).tolist() == [4, 2]
    assert over_bound_tokens(versions, 7, 3).tolist() == [True, False, False]
    assert over_bound_tokens(versions, 7, 4).tolist() == [False, False, False]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), groups_per_step=batches, policy=policies)
def test_a_bound_lowered_while_running_breaks_neither_the_old_bound_nor_progress(data, groups_per_step, policy):
    world = World(Admission(max_staleness=5, groups_per_step=groups_per_step, over_bound=policy), data)
    lowered_at = data.draw(st.integers(0, 40))
    for turn in range(60):
        if turn == lowered_at:
            world.admission.tighten(data.draw(st.integers(0, 5)))
        world.move(data.draw(st.sampled_from(world.moves())))
    if policy != "mask":
        assert all(0 <= version - world.oldest[group] <= 5 for group, version in world.consumed)
    start = world.version
    for _ in range(20 * 6 * groups_per_step):
        if "train" in world.moves() and world.train():
            break
        world.move(data.draw(st.sampled_from([m for m in world.moves() if m != "train"])))
    assert world.version > start


class ManyEngines(World):
    """Engines that take versions at moments of their own, die, and come back with the newest; groups move on death."""

    def __init__(self, admission: Admission, data: st.DataObject) -> None:
        super().__init__(admission, data)
        self.engines = [0] * data.draw(st.integers(1, 4))
        self.home: dict[int, int] = {}

    def moves(self) -> list[str]:
        moves = [move for move in super().moves() if move not in ("sync", "issue")]
        moves += ["sync", "die"] * (min(self.engines) < self.version)
        return moves + ["issue"] * bool(self.admitting())

    def admitting(self) -> list[int]:
        return [
            index
            for index, version in enumerate(self.engines)
            if self.admission.may_issue(policy_version=self.version, engine_version=version)
        ]

    def sync(self) -> bool:
        lagging = [index for index, version in enumerate(self.engines) if version < self.version]
        index = self.data.draw(st.sampled_from(lagging))
        self.engines[index] = self.data.draw(st.integers(self.engines[index] + 1, self.version))
        return True

    def issue(self) -> bool:
        index = self.data.draw(st.sampled_from(self.admitting()))
        self.engine_version = self.engines[index]
        self.home[self.next_group] = index
        return super().issue()

    def die(self) -> bool:
        """Its groups go to engines that hold what they were issued at, or a newer version; it comes back newest."""
        index = self.data.draw(st.integers(0, len(self.engines) - 1))
        self.engines[index] = self.version
        for group, home in self.home.items():
            if home == index and group in self.issue_version:
                fit = [i for i, version in enumerate(self.engines) if version >= self.issue_version[group]]
                self.home[group] = self.data.draw(st.sampled_from(fit))
        return True

    def finish(self) -> bool:
        group = self.data.draw(st.sampled_from(sorted(self.issue_version)))
        oldest = self.data.draw(st.integers(self.issue_version.pop(group), self.engines[self.home.pop(group)]))
        self.oldest[group] = oldest
        self.admission.ready(group, oldest_version=oldest)
        return True


@settings(max_examples=150, deadline=None)
@given(data=st.data(), max_staleness=bounds, groups_per_step=batches, policy=policies, ready=ready_limits)
def test_the_bound_holds_with_every_engine_on_a_version_of_its_own(data, max_staleness, groups_per_step, policy, ready):
    admission = Admission(
        max_staleness=max_staleness, groups_per_step=groups_per_step, over_bound=policy, max_ready_batches=ready
    )
    world = ManyEngines(admission, data)
    for _ in range(data.draw(st.integers(1, 80))):
        world.move(data.draw(st.sampled_from(world.moves())))
        world.check_slots()
    if policy != "mask":
        assert all(0 <= version - world.oldest[group] <= max_staleness for group, version in world.consumed)
    if policy != "drop":
        assert not world.dropped


@settings(max_examples=100, deadline=None)
@given(data=st.data(), max_staleness=bounds, groups_per_step=batches, policy=policies)
def test_engines_on_versions_of_their_own_never_deadlock_the_learner(data, max_staleness, groups_per_step, policy):
    admission = Admission(max_staleness=max_staleness, groups_per_step=groups_per_step, over_bound=policy)
    world = ManyEngines(admission, data)
    for _ in range(data.draw(st.integers(0, 40))):
        world.move(data.draw(st.sampled_from(world.moves())))
    start = world.version
    for _ in range(10 * admission.capacity + 40):
        if "train" in world.moves() and world.train():
            break
        others = [m for m in world.moves() if m not in ("train", "die")]
        assert others, "nobody can move"
        world.move(data.draw(st.sampled_from(others)))
    assert world.version > start


class LagWorld(World):
    """Engines may take a new version only when the admission says that theirs is sampled; groups may fail."""

    admission: ExactLag

    def moves(self) -> list[str]:
        moves = [move for move in super().moves() if move != "sync"]
        if self.engine_version < self.version and self.admission.is_sampled(self.engine_version, demand_met=False):
            moves.append("sync")
        return moves + ["fail"] * bool(self.issue_version)

    def sync(self) -> bool:
        self.engine_version += 1  # at most one version is in flight
        return True

    def fail(self) -> bool:
        group = self.data.draw(st.sampled_from(sorted(self.issue_version)))
        del self.issue_version[group]
        self.admission.remove(group)
        return True

    def train(self) -> bool:
        # At most one version is in flight to the engines.
        return self.version <= self.engine_version + 1 and super().train()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lag=bounds, groups_per_step=batches)
def test_an_exact_lag_trains_every_batch_on_one_version_that_many_steps_back(data, lag, groups_per_step):
    world = LagWorld(ExactLag(lag=lag, groups_per_step=groups_per_step), data)
    for _ in range(60):
        world.move(data.draw(st.sampled_from(world.moves())))
    assert all(world.oldest[group] == max(0, version - lag) for group, version in world.consumed)
