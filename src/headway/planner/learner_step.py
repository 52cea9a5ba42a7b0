"""The learner at work, in simulated time."""

import simpy

from headway.planner.setup import Setup


class LearnerStep:
    """One optimizer step under way; slower while an engine decodes, where they share a machine."""

    def __init__(self, env: simpy.Environment, setup: Setup, work_s: float) -> None:
        self._env, self._slowdown, self._work_s = env, setup.shared.learner_slowdown, work_s
        self._factor, self._as_of = 1.0, env.now
        self._turn = 0
        self.done = env.event()

    def sharing(self, with_engines: bool) -> None:
        """Engines began to decode, or all of them stopped."""
        self._work_s = max(0.0, self._work_s - (self._env.now - self._as_of) / self._factor)
        self._as_of = self._env.now
        self._factor = self._slowdown if with_engines else 1.0
        self._turn += 1
        end = self._env.timeout(self._work_s * self._factor, self._turn)
        assert end.callbacks is not None
        end.callbacks.append(self._end)

    def _end(self, event: simpy.Event) -> None:
        if event.value == self._turn and not self.done.triggered:
            self.done.succeed()
