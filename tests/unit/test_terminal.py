"""The terminal view takes every record a run can log."""

import io
from dataclasses import fields
from typing import Any

import pytest
from rich.console import Console

from headway.accounts import FATES, Audit
from headway.config import RunConfig
from headway.report.terminal import TerminalView, elapsed_s, summary


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


STEP = {
    "kind": "step",
    "step": 6,
    "policy_version": 6,
    "reward": 0.625,
    "staleness_token_mean": 1.25,
    "staleness_token_max": 3.0,
    "num_generating": 5,
    "num_ready": 2,
    "sampled_tokens_per_s": 1234.0,
    "engine_idle": 0.11,
    "trained_tokens_per_s": 987.0,
    "learner_idle": 0.42,
}
TEST = {"kind": "evaluation", "split": "test", "policy_version": 0, "accuracy": 0.5, "num_prompts": 400}


@pytest.mark.parametrize("terminal", [True, False])
def test_reward_accuracy_staleness_and_the_pace_of_both_sides_are_shown(terminal: bool):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    with TerminalView(RunConfig(num_steps=50), console=console) as view:
        view.log(TEST)
        view._last_line = float("-inf")
        view.log(STEP)
    said = " ".join(out.getvalue().split())
    assert "step 7/50" in said and "reward 0.625" in said and "ETA" in said
    assert "1,234 tok/s, idle 11%" in said and "987 tok/s, idle 42%" in said
    shown = ("test 0.500 (version 0)", "1.25, max 3", "5 generating, 2 ready")
    assert all(text in said for text in (shown if terminal else ("test accuracy 0.500", "1.25 (max 3)"))), said


def test_the_closing_table_says_what_a_run_came_to():
    steps = [STEP | {"step": i, "token_staleness": {"0": 30, "2": 10}} for i in range(5)]
    tests = [TEST, TEST | {"policy_version": 5, "accuracy": 0.9375}]
    samples = {"trained": 40, "masked": 1, "dropped": 8, "generating": 4, "ready": 3}
    said = closing(steps + tests, audit(samples_issued=56, samples=samples), seconds=83.25)
    assert "test accuracy │ 0.500 → 0.938 (400 prompts)" in said
    assert "wall-clock │ 83.2 s" in said and "optimizer steps │ 5" in said and "tokens trained │ 200" in said
    assert "token staleness │ 0: 75.0% 2: 25.0%" in said and "idle │ learner 42%, engines 11%" in said
    assert "samples │ issued 56 = trained 40 + masked 1 + dropped 8 + in flight 7" in said
    assert "ledger │ adds up" in said
    assert "ledger │ 3 lost" in closing(steps, audit(violations=["3 lost"]), seconds=1.0)


def test_the_clock_of_a_resumed_run_counts_all_of_its_processes():
    redone = {key: value for key, value in STEP.items() if key != "elapsed_s"}
    records = [STEP | {"elapsed_s": s} for s in (5.0, 9.0)] + [redone] + [TEST | {"elapsed_s": s} for s in (2.0, 3.5)]
    assert elapsed_s(records) == 12.5
    assert elapsed_s([]) == 0


def closing(records: list[dict[str, Any]], audit: Audit, *, seconds: float) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(summary(records, audit, seconds=seconds))
    return " ".join(out.getvalue().split())


def audit(**facts: Any) -> Audit:
    nothing: dict[str, Any] = {field.name: {} for field in fields(Audit)}
    nothing |= {"samples": dict.fromkeys(FATES, 0), "samples_issued": 0, "violations": []}
    return Audit(**nothing | facts)


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
    out = io.StringIO()
    Console(file=out, width=200).print(summary(records, audit(), seconds=1.0))
    (line,) = (line for line in out.getvalue().splitlines() if "reward, first" in line)
    assert label in line and value in line
