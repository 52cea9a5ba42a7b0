"""One simulated engine: continuous batching as processor sharing on a clock that counts decode steps.

All n active sequences gain one token a step, and a step takes step_s + n·sequence_s + K·context_s. So a response that
joins at clock c with L tokens ends at clock c + L whatever joins or leaves meanwhile: one event a response, not one a
token. Between events K grows by n a step, and x steps take A·x + C·x²/2 with A = decode_step(n, K), C = n·context_s.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import simpy

from headway.planner.costs import EngineCosts

_TINY = 1e-6


class Request:
    """One turn of one response, waiting or decoding."""

    __slots__ = ("begun", "context", "group", "member", "num_tokens", "shares_prompt")

    def __init__(self, group: int, member: int, num_tokens: int, context: int, shares_prompt: bool) -> None:
        self.group, self.member = group, member
        self.num_tokens = num_tokens
        self.context = context
        """Tokens to prefill: prompt, earlier turns, observations."""
        self.shares_prompt = shares_prompt
        """Members that start together prefill their common prompt once."""
        self.begun = 0


class SimulatedEngine:
    """Decodes requests in order of arrival, at most `num_slots` together.

    Consumes: requests, versions. Produces: `finish(engine, requests)`. Waits for: the next end.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        *,
        costs: EngineCosts,
        num_slots: int,
        finish: Callable[["SimulatedEngine", list[Request]], None],
        set_busy: Callable[[int], None],
    ) -> None:
        self._env, self._costs, self._num_slots, self._finish = env, costs, num_slots, finish
        self._set_busy = set_busy
        self.index = index
        self.num_pending = 0
        """Requests waiting or decoding."""
        self.busy_s = 0.0
        self.num_tokens = 0
        self.num_steps = 0.0
        self.num_refills = 0
        self._waiting: deque[Request] = deque()
        self._ends: dict[int, list[Request]] = {}
        self._end_clocks: list[int] = []
        self._num_active, self._num_cached = 0, 0.0
        self._clock, self._as_of, self._stalled_until = 0.0, 0.0, 0.0
        self._slowdown = 1.0
        self._due, self._refilled_at = math.inf, -1
        self._switch_clocks, self._switch_versions = [0], [0]

    @property
    def version(self) -> int:
        return self._switch_versions[-1]

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; they start in free slots at the next step."""
        self.advance()
        if not self.num_pending:
            self._set_busy(1)
        self._waiting.extend(requests)
        self.num_pending += len(requests)
        self._refill()
        self._schedule()

    def load(self, version: int, *, pause_s: float, prefill_again: bool) -> None:
        """Every later token carries `version`; what is cached is kept, or computed again."""
        self.advance()
        self._switch_clocks.append(math.ceil(self._clock - _TINY))
        self._switch_versions.append(version)
        again = self._num_cached * self._costs.prefill_s if prefill_again else 0.0
        self._stall(pause_s + again)
        self._schedule()

    def set_slowdown(self, factor: float) -> None:
        """From now on every step takes `factor` times as long."""
        self.advance()
        self._slowdown = factor
        self._schedule()

    def versions(self, request: Request) -> list[tuple[int, int]]:
        """(version, tokens) of a request that ended, oldest first."""
        first, last = request.begun, request.begun + request.num_tokens
        at = bisect_right(self._switch_clocks, first) - 1
        counts = []
        while first < last:
            end = self._switch_clocks[at + 1] if at + 1 < len(self._switch_clocks) else last
            end = min(end, last)
            if end > first:
                counts.append((self._switch_versions[at], end - first))
                first = end
            at += 1
        return counts

    def advance(self) -> None:
        """Bring the clock and the accounts to now."""
        now = self._env.now
        stalled = min(now, self._stalled_until) - self._as_of
        if stalled > 0 and self.num_pending:
            self.busy_s += stalled
        running = now - max(self._as_of, self._stalled_until)
        if running > 0 and self._num_active:
            self.busy_s += running
            steps = self._steps_in(running)
            self._clock += steps
            self.num_steps += steps
            self._num_cached += steps * self._num_active
        self._as_of = now

    def _steps_in(self, seconds: float) -> float:
        linear = self._slowdown * self._costs.decode_step(self._num_active, self._num_cached)
        growth = self._slowdown * self._num_active * self._costs.context_s
        return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * growth * seconds))

    def _seconds_for(self, steps: float) -> float:
        linear = self._slowdown * self._costs.decode_step(self._num_active, self._num_cached)
        return linear * steps + self._slowdown * self._num_active * self._costs.context_s * steps * steps / 2

    def _stall(self, seconds: float) -> None:
        if seconds:
            self._stalled_until = max(self._env.now, self._stalled_until) + seconds * self._slowdown

    def _refill(self) -> None:
        prefilled: set[int] = set()
        num_tokens, were_active = 0, self._num_active
        begun = math.ceil(self._clock - _TINY)
        while self._waiting and self._num_active < self._num_slots:
            request = self._waiting.popleft()
            request.begun = begun
            end = begun + request.num_tokens
            if end in self._ends:
                self._ends[end].append(request)
            else:
                self._ends[end] = [request]
                heappush(self._end_clocks, end)
            self._num_active += 1
            self._num_cached += request.context
            if not (request.shares_prompt and request.group in prefilled):
                num_tokens += request.context
                prefilled.add(request.group)
        if self._num_active > were_active and begun > self._refilled_at:  # else in one pass with those before them
            self._refilled_at = begun
            self.num_refills += 1
            self._stall(self._costs.refill_s)
        self._stall(num_tokens * self._costs.prefill_s)

    def _schedule(self) -> None:
        """Wake at the next end, unless a wake-up comes before it anyway."""
        if not self._end_clocks:
            return
        start = max(self._env.now, self._stalled_until)
        due = start + self._seconds_for(max(0.0, self._end_clocks[0] - self._clock))
        if due < self._due - 1e-12:
            self._due = due
            wake = self._env.timeout(max(0.0, due - self._env.now), due)
            assert wake.callbacks is not None
            wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._due:  # an earlier end was scheduled since, and has been dealt with
            return
        self._due = math.inf
        self.advance()
        ended: list[Request] = []
        while self._end_clocks and self._has_come(self._end_clocks[0]):
            end = heappop(self._end_clocks)
            self._clock = max(self._clock, float(end))
            ended += self._ends.pop(end)
        if ended:
            self._retire(ended)
        self._schedule()

    def _has_come(self, end: int) -> bool:
        """Whether this end is reached, or so near that a clock which has run for long cannot show the difference."""
        now = self._env.now
        return end <= self._clock + _TINY or (
            now >= self._stalled_until and now + self._seconds_for(end - self._clock) <= now
        )

    def _retire(self, ended: list[Request]) -> None:
        self._num_active -= len(ended)
        self.num_pending -= len(ended)
        for request in ended:
            self._num_cached -= request.context + request.num_tokens
            self.num_tokens += request.num_tokens
        if not self._num_active:
            self._num_cached = 0.0  # no drift from rounding
        self._refill()
        if not self.num_pending:
            self._set_busy(-1)
        self._finish(self, ended)
