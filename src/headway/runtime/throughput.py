"""Rates and idle shares between two steps."""

import time
from collections.abc import Sequence

from headway.runtime.waits import Waits
from headway.types import EngineStatus


class Throughput:
    """Turns running totals into rates since the last call."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._begun = self._last = time.monotonic()
        self._last_idle_s = 0.0
        self._last_cpu_s = time.thread_time()
        self._engine_totals = (0, 0, 0.0, 0.0, 0, 0, 0.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began in this process."""
        return time.monotonic() - self._begun

    def since_last(self, statuses: Sequence[EngineStatus], num_responses: int) -> dict[str, float]:
        """Metrics `elapsed_s`, `step_s`, `controller_s`, the rates, what engines count, the idle shares.

        Must be called from the thread of the event loop, whose CPU time is the controller's.
        """
        now, idle_s, cpu_s = time.monotonic(), self._waits.idle_s("learner"), time.thread_time()
        step_s = now - self._last
        totals = (
            sum(s.num_tokens for s in statuses),
            sum(s.num_steps for s in statuses),
            sum(s.busy_s for s in statuses),
            sum(s.up_s for s in statuses),
            sum(s.num_refills for s in statuses),
            sum(s.num_plain_steps for s in statuses),
            sum(s.plain_s for s in statuses),
        )
        # A restarted engine counts from zero again: its first interval is left out rather than negative.
        tokens, decode_steps, busy_s, up_s, refills, plain_steps, plain_s = (
            max(0.0, a - b) for a, b in zip(totals, self._engine_totals, strict=True)
        )
        metrics = {
            "elapsed_s": now - self._begun,
            "step_s": step_s,
            "controller_s": cpu_s - self._last_cpu_s,
            "responses_per_s": num_responses / step_s,
            "sampled_tokens_per_s": tokens / step_s,
            "mean_active": tokens / decode_steps if decode_steps else 0.0,
            "decode_step_s": plain_s / plain_steps if plain_steps else 0.0,
            "num_refills": refills,
            "learner_idle": min(1.0, (idle_s - self._last_idle_s) / step_s),
            "engine_idle": min(1.0, max(0.0, 1 - busy_s / up_s)) if up_s else 0.0,
        }
        self._last, self._last_idle_s, self._last_cpu_s, self._engine_totals = now, idle_s, cpu_s, totals
        return metrics
