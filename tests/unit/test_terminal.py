"""The terminal view takes every record a run can log."""

import io

import pytest
from rich.console import Console

from headway.accounts import Audit
from headway.config import RunConfig
from headway.report.terminal import TerminalView, summary


def test_a_step_trained_again_has_no_throughput_and_is_shown_all_the_same():
    for terminal in (True, False):
        out = io.StringIO()
        view = TerminalView(RunConfig(), console=Console(file=out, force_terminal=terminal, width=200))
        view._last_line = float("-inf")
        with view:
            view.log({"kind": "step", "step": 4, "policy_version": 4, "redone": True, "reward": 0.5})
        assert "step 5 trained again" in out.getvalue()


def test_the_time_left_is_judged_by_the_steps_and_not_by_the_cold_start_before_them(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("headway.report.terminal.time.monotonic", lambda: clock[0])
    view = TerminalView(RunConfig(num_steps=100), console=Console(file=io.StringIO(), force_terminal=True))
    assert view._eta() == "…"
    for step, at in ((10, 500.0), (11, 502.0), (19, 518.0)):
        clock[0] = at
        view.log({"kind": "step", "step": step})
    assert view._eta() == "160 s"


def test_messages_with_brackets_are_shown_as_they_are():
    out = io.StringIO()
    TerminalView(RunConfig(), console=Console(file=out, width=200)).say("log of [rank0] in [/usr/lib]")
    assert "[rank0] in [/usr/lib]" in out.getvalue()


@pytest.mark.parametrize(
    ("num_steps", "label", "value"),
    [
        (1, "first → last step", "0.000 → 0.000"),
        (4, "first 2 → last 2 steps", "0.500 → 2.500"),
        (40, "first 10 → last 10 steps", "4.500 → 34.500"),
    ],
)
def test_the_closing_table_names_its_windows_which_never_overlap(num_steps, label, value):
    records = [{"kind": "step", "reward": float(i), "token_staleness": {"0": 1}} for i in range(num_steps)]
    audit = Audit(
        num_groups=0,
        num_steps=num_steps,
        samples_issued=0,
        tokens_sampled=0,
        samples=dict.fromkeys(("trained", "masked", "dropped", "generating", "ready"), 0),
        tokens={},
        losses={},
        sample_staleness={},
        token_staleness={},
        mean_reward={},
        lengths=[],
        num_unknown_lengths=0,
        violations=[],
    )
    out = io.StringIO()
    Console(file=out, width=200).print(summary(records, audit, seconds=1.0))
    (line,) = (line for line in out.getvalue().splitlines() if "training reward" in line)
    assert label in line and value in line
