"""The terminal view takes every record a run can log."""

import io

from rich.console import Console

from headway.config import RunConfig
from headway.report.terminal import TerminalView


def test_a_step_trained_again_has_no_throughput_and_is_shown_all_the_same():
    for terminal in (True, False):
        out = io.StringIO()
        view = TerminalView(RunConfig(), console=Console(file=out, force_terminal=terminal, width=200))
        view._last_line = float("-inf")
        with view:
            view.log({"kind": "step", "step": 4, "policy_version": 4, "redone": True, "reward": 0.5})
        assert "step 5 trained again" in out.getvalue()


def test_messages_with_brackets_are_shown_as_they_are():
    out = io.StringIO()
    TerminalView(RunConfig(), console=Console(file=out, width=200)).say("log of [rank0] in [/usr/lib]")
    assert "[rank0] in [/usr/lib]" in out.getvalue()
