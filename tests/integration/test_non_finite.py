"""A log-prob that is not finite ends a run with one line that says whose it is, and `resume` says the same."""

from pathlib import Path
from typing import Any

import pytest
from runs import headway, train_arguments

from headway.training import passes


def test_a_non_finite_logprob_ends_in_one_line_and_resume_repeats_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, score_rows = tmp_path / "run", passes.score_rows

    def spoiled(policy: Any, rows: Any, **settings: Any):
        logprobs, entropy = score_rows(policy, rows, **settings)
        newest = rows.versions.max() > 0
        return (logprobs * float("nan") if newest else logprobs), entropy

    monkeypatch.setattr(passes, "score_rows", spoiled)
    started = headway(*train_arguments(run, model, num_steps=4, evaluation__every=0, evaluation__test_size=0))
    resumed = headway("resume", run)
    for ended in (started, resumed):
        assert ended.returncode == 1
        assert "Traceback" not in ended.stdout + ended.stderr
        (line,) = (line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("error:"))
        assert "logprobs of group" in line and "member" in line and "is nan, as the policy being trained" in line
        assert "stops here again" in line
