"""The learner at work, in simulated time."""

import simpy

from headway.planner.setup import Setup


class LearnerStep:
    """One optimizer step under way; slower while an engine decodes, where they share a machine.

    The controller costs it time as well: both run in one process, and Python computes for one of them at a time.
    """

    def __init__(self, env: simpy.Environment, setup: Setup, work_s: float) -> None:
        self._env, self._shared, self._work_s = env, setup.shared, work_s
        self._factor, self._as_of, self._lost_s = 1.0, env.now, 0.0
        self._turn = 0
        self.done = env.event()
        self._schedule()

    def sharing(self, num_engines: int) -> None:
        """So many engines decode from now on."""
        factor = (self._shared.learner_slowdown if num_engines else 1.0) * self._shared.crowding(1 + num_engines)
        if factor != self._factor:
            self._advance()
            self._factor = factor
            self._schedule()

    def lose(self, seconds: float) -> None:
        """Stand still for that long, now or later in the step."""
        self._advance()
        self._lost_s += seconds
        self._schedule()

    def _advance(self) -> None:
        """Take what was done since the last change off the time lost, then off the work that is left."""
        passed = self._env.now - self._as_of
        stood = min(passed, self._lost_s)
        self._lost_s -= stood
        self._work_s = max(0.0, self._work_s - (passed - stood) / self._factor)
        self._as_of = self._env.now

    def _schedule(self) -> None:
        self._turn += 1
        end = self._env.timeout(self._lost_s + self._work_s * self._factor, self._turn)
        assert end.callbacks is not None
        end.callbacks.append(self._end)

    def _end(self, event: simpy.Event) -> None:
        if event.value == self._turn and not self.done.triggered:
            self.done.succeed()
