"""What is simulated: the run's shape, its workload, and what everything costs."""

from dataclasses import dataclass, field, replace
from typing import Literal

from headway.planner.costs import EngineCosts, LearnerCosts, SharedCosts, SyncCosts, ToolCosts
from headway.planner.lengths import Lengths
from headway.staleness import OverBound


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration of engines and learner, with the costs of this hardware."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    lengths: Lengths
    engine: EngineCosts
    learner: LearnerCosts
    over_bound: OverBound = "wait"
    max_ready_batches: int | None = None
    """As in the runtime: no group is issued while this many whole batches wait. None: only the bound limits."""
    num_engines: int = 1
    num_slots: int = 64
    learner_devices: float = 1
    on_update: Literal["keep", "recompute", "interrupt"] = "keep"
    """New weights in flight: the cache is kept, or computed again (an interrupted request prefills what it has)."""
    prompt_tokens: int = 0
    sync: SyncCosts = field(default_factory=SyncCosts)
    tool: ToolCosts = field(default_factory=ToolCosts)
    shared: SharedCosts = field(default_factory=SharedCosts)

    @property
    def batch_size(self) -> int:
        """Responses a step."""
        return self.groups_per_step * self.group_size

    def synchronous(self) -> "Setup":
        """The same engines and learner, bound 0."""
        return replace(self, max_staleness=0, over_bound="wait")

    def colocated(self, *, num_devices: int, devices_per_engine: int) -> "Setup":
        """Bound 0 with every device serving both sides in turn; what switching sides costs belongs in `sync`.

        Cores that are shared are devices of neither side: the learner keeps what it has.
        """
        return replace(
            self.synchronous(),
            num_engines=max(1, num_devices // devices_per_engine),
            learner_devices=self.learner_devices if self.shared.num_cores else num_devices,
        )

    def shrunk(self, cohort: int) -> "Setup":
        """Engines, groups and learner divided by `cohort`: each simulated engine stands for that many.

        Rates per engine stay; the longest of fewer responses is shorter, which flatters bound 0 a little.
        """
        if cohort == 1:
            return self
        return replace(
            self,
            num_engines=max(1, round(self.num_engines / cohort)),
            groups_per_step=max(1, round(self.groups_per_step / cohort)),
            learner_devices=self.learner_devices / cohort,
            shared=replace(
                self.shared,
                controller_s=self.shared.controller_s * cohort,
                num_cores=-(-self.shared.num_cores // cohort),
            ),
        )
