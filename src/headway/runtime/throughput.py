"""Rates and idle shares between two steps."""

import time
from collections.abc import Mapping

from headway.runtime.waits import Waits
from headway.types import EngineStatus

_TOTALS = ("num_tokens", "num_steps", "busy_s", "up_s", "num_plain_steps", "num_plain_tokens", "plain_s")
"""What an engine counts from its start."""


class Throughput:
    """Turns running totals into rates since the last call."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._begun = self._last = time.monotonic()
        self._last_idle_s = 0.0
        self._last_cpu_s = time.thread_time()
        self._last_statuses: Mapping[str, EngineStatus] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began in this process."""
        return time.monotonic() - self._begun

    def since_last(self, statuses: Mapping[str, EngineStatus], num_responses: int) -> dict[str, float]:
        """Metrics `elapsed_s`, `step_s`, `controller_s`, the rates, what engines count, the idle shares.

        Must be called from the thread of the event loop, whose CPU time is the controller's.
        """
        now, idle_s, cpu_s = time.monotonic(), self._waits.idle_s("learner"), time.thread_time()
        step_s = now - self._last
        gained = _gained(self._last_statuses, statuses)
        metrics = {
            "elapsed_s": now - self._begun,
            "step_s": step_s,
            "controller_s": cpu_s - self._last_cpu_s,
            "responses_per_s": num_responses / step_s,
            "sampled_tokens_per_s": gained["num_tokens"] / step_s,
            "mean_active": _ratio(gained["num_tokens"], gained["num_steps"]),
            "num_refills": gained["num_steps"] - gained["num_plain_steps"],
            "num_decode_steps": gained["num_plain_steps"],
            "decode_active": _ratio(gained["num_plain_tokens"], gained["num_plain_steps"]),
            "decode_step_s": _ratio(gained["plain_s"], gained["num_plain_steps"]),
            "learner_idle": min(1.0, (idle_s - self._last_idle_s) / step_s),
            "engine_idle": min(1.0, max(0.0, 1 - gained["busy_s"] / gained["up_s"])) if gained["up_s"] else 0.0,
        }
        self._last, self._last_idle_s, self._last_cpu_s, self._last_statuses = now, idle_s, cpu_s, statuses
        return metrics


def _gained(before: Mapping[str, EngineStatus], now: Mapping[str, EngineStatus]) -> dict[str, float]:
    """What all engines counted between two moments; a restarted one counts from zero, so its interval is left out."""
    gained: dict[str, float] = dict.fromkeys(_TOTALS, 0.0)
    for name, status in now.items():
        last = before.get(name)
        own = {total: getattr(status, total) - (getattr(last, total) if last else 0) for total in _TOTALS}
        if min(own.values()) >= 0:
            gained = {total: gained[total] + own[total] for total in _TOTALS}
    return gained


def _ratio(sum_of: float, over: float) -> float:
    return sum_of / over if over else 0.0
