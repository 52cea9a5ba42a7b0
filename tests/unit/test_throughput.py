"""Rates and means between two steps, from what engines count since their start."""

from dataclasses import replace

import pytest

from headway.runtime.throughput import Throughput
from headway.runtime.waits import Waits
from headway.types import EngineStatus

FIRST = EngineStatus(
    version=0, num_active=0, num_waiting=0, num_tokens=100, busy_s=6.0, up_s=10.0,
    num_steps=20, num_plain_steps=12, num_plain_tokens=48, plain_s=0.6,
)  # fmt: skip


def later(status: EngineStatus) -> EngineStatus:
    return replace(
        status,
        num_tokens=status.num_tokens + 60,
        busy_s=status.busy_s + 1,
        up_s=status.up_s + 4,
        num_steps=status.num_steps + 15,
        num_plain_steps=status.num_plain_steps + 10,
        num_plain_tokens=status.num_plain_tokens + 30,
        plain_s=status.plain_s + 0.2,
    )


@pytest.fixture
def throughput() -> Throughput:
    return Throughput(Waits(limit_s=60, say=lambda line: None))


def test_what_engines_counted_since_the_last_step_is_summed_over_engines(throughput: Throughput):
    throughput.since_last({"a": FIRST, "b": FIRST}, 8)
    found = throughput.since_last({"a": later(FIRST), "b": later(FIRST)}, 8)
    assert (found["num_refills"], found["num_decode_steps"]) == (10, 20)
    assert (found["mean_active"], found["decode_active"]) == (4.0, 3.0)
    assert found["decode_step_s"] == pytest.approx(0.02)
    assert found["engine_idle"] == pytest.approx(0.75)


def test_an_engine_that_was_restarted_is_left_out_whole(throughput: Throughput):
    throughput.since_last({"a": FIRST, "b": FIRST}, 8)
    # Twice as slow as the one before, and with more seconds in its plain steps than that one had.
    restarted = replace(FIRST, num_tokens=5, num_steps=4, num_plain_steps=2, num_plain_tokens=2, plain_s=9.0, up_s=9.5)
    found = throughput.since_last({"a": later(FIRST), "b": restarted}, 8)
    assert (found["num_refills"], found["num_decode_steps"]) == (5, 10)
    assert found["decode_step_s"] == pytest.approx(0.02)
    after = throughput.since_last({"a": later(later(FIRST)), "b": later(restarted)}, 8)
    assert after["num_decode_steps"] == 20
