"""Whatever happens to samples in whatever order, their accounts add up, and a reopened ledger knows it all."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway import wire
from headway.ledger import Ledger
from headway.types import Response

GROUP_SIZE = 3
Sample = tuple[int, int]


def make_response(versions: list[int], reward: float) -> Response:
    num = len(versions)
    return Response(
        token_ids=np.arange(num, dtype=np.int32),
        mask=np.ones(num, bool),
        versions=np.array(versions, np.int32),
        reward=reward,
    )


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger beside a plain model of it: fate by sample, response by sample, batches by step."""

    @initialize()
    def create(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger(self.path, group_size=GROUP_SIZE, create=True)
        self.version = 0
        self.fates: dict[Sample, str] = {}
        self.responses: dict[Sample, Response] = {}
        self.masked: Counter[Sample] = Counter()
        self.discarded = 0
        self.steps: list[tuple[int, list[int]]] = []
        self.pruned = -1

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()

    def samples(self, *fates: str) -> list[Sample]:
        return [sample for sample, fate in self.fates.items() if fate in fates]

    def ready_groups(self) -> list[int]:
        counts = Counter(group_id for group_id, _ in self.samples("ready"))
        return [group_id for group_id, num in counts.items() if num == GROUP_SIZE]

    @rule()
    def issue(self) -> None:
        group_id = len(self.fates) // GROUP_SIZE
        self.ledger.issue(group_id, self.version)
        self.fates.update({(group_id, member): "generating" for member in range(GROUP_SIZE)})

    @precondition(lambda self: self.samples("generating"))
    @rule(data=st.data(), num=st.integers(1, 3))
    def finish(self, data: st.DataObject, num: int) -> None:
        for sample in self.samples("generating")[:num]:
            versions = data.draw(st.lists(st.integers(0, self.version), min_size=1, max_size=5))
            self.responses[sample] = make_response(sorted(versions), reward=float(len(versions)))
            self.ledger.finish(*sample, self.responses[sample])
            self.fates[sample] = "ready"

    @precondition(lambda self: self.fates)
    @rule(data=st.data(), num_tokens=st.integers(0, 9))
    def discard(self, data: st.DataObject, num_tokens: int) -> None:
        self.ledger.discard(*data.draw(st.sampled_from(sorted(self.fates))), num_tokens, "engine died")
        self.discarded += num_tokens

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group_id, _ = data.draw(st.sampled_from(sorted(self.fates)))
        self.ledger.drop(group_id, "too stale")
        for sample in self.samples("generating", "ready"):
            if sample[0] == group_id:
                self.fates[sample] = "dropped"

    @precondition(lambda self: self.ready_groups())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        group_ids = data.draw(st.permutations(self.ready_groups()))[: data.draw(st.integers(1, 3))]
        ages: Counter[int] = Counter()
        num_masked: dict[Sample, int] = {}
        for sample in [(group_id, member) for group_id in group_ids for member in range(GROUP_SIZE)]:
            versions = self.responses[sample].versions
            num_masked[sample] = data.draw(st.integers(0, len(versions)))
            ages.update(self.version - int(version) for version in versions[num_masked[sample] :])
            self.fates[sample] = "masked" if num_masked[sample] == len(versions) else "trained"
        self.masked.update(num_masked)
        self.ledger.commit_step(len(self.steps), self.version, group_ids, token_staleness=ages, num_masked=num_masked)
        self.steps.append((self.version, group_ids))
        self.version += 1

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, len(self.steps) - 1))
        self.ledger.prune(step)
        self.pruned = max(self.pruned, step)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path, group_size=GROUP_SIZE, create=False)

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        report = self.ledger.audit()
        assert report.ok, report.violations
        assert report.samples == {fate: len(self.samples(fate)) for fate in report.samples}
        lengths = {sample: len(r.versions) for sample, r in self.responses.items()}
        tokens = dict.fromkeys(report.tokens, 0)
        for sample, length in lengths.items():
            tokens[self.fates[sample]] += length - self.masked[sample]
            tokens["masked"] += self.masked[sample]
        tokens["dropped"] += self.discarded
        assert report.tokens == tokens
        assert report.tokens_sampled == sum(lengths.values()) + self.discarded

    @invariant()
    def recovery_is_exact(self) -> None:
        if not hasattr(self, "ledger"):
            return
        found = self.ledger.recover(self.pruned)
        assert found.next_group_id == len(self.fates) // GROUP_SIZE
        assert [(s.policy_version, list(s.group_ids)) for s in found.redo] == self.steps[self.pruned + 1 :]
        for step in found.redo:
            for group_id, members in zip(step.group_ids, step.responses, strict=True):
                self.same(group_id, dict(enumerate(members)))
        assert sorted(found.ready) == sorted(self.ready_groups())
        waiting = {group_id for group_id, _ in self.samples("generating")}
        assert set(found.partial) == waiting
        for group_id, members in found.ready.items():
            self.same(group_id, dict(enumerate(members)))
        for group_id, members in found.partial.items():
            expected = {m for g, m in self.samples("ready") if g == group_id}
            assert set(members) == expected
            self.same(group_id, members)

    def same(self, group_id: int, members: dict[int, Response]) -> None:
        for member, response in members.items():
            assert wire.encode(response) == wire.encode(self.responses[group_id, member])


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
