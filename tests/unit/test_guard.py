"""The guard on recorded metric streams: what it says, when it acts, and that it decides the same after a resume."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from headway.ledger_recovery import Recovery
from headway.runtime.recovery import recover
from headway.training.guard import Action, Guard, Limits, explain, stored_bound

HEALTHY = {"grad_cosine": 0.05, "ess_tokens": 0.95, "k3_behavior_policy": 0.001, "learning_rate": 1e-4}
ALIGNED = HEALTHY | {"grad_cosine": 0.8}


def guard(action: Action = "warn", **limits: float) -> Guard:
    return Guard(replace(Limits(window=4), **limits), action=action, max_staleness=8)


def feed(watcher: Guard, stream: list[dict[str, float]]) -> list[dict[str, float]]:
    return [watcher.observe(metrics) for metrics in stream]


def test_a_healthy_run_gives_no_sign():
    said = feed(guard(action="lower_lr"), [HEALTHY] * 30)
    assert all(m == {"guard_signs": 0, "guard_lr_scale": 1, "guard_max_staleness": 8} for m in said)
    assert explain(said[-1]) is None


def test_one_bad_step_is_no_sign_and_a_window_of_them_is():
    said = feed(guard(), [HEALTHY] * 4 + [ALIGNED] + [HEALTHY] * 4 + [ALIGNED] * 4)
    assert [m["guard_signs"] for m in said] == [0] * 11 + [1, 1]


@pytest.mark.parametrize(
    ("change", "bit", "word"),
    [
        ({"grad_cosine": 0.8}, 1, "grad_cosine"),
        ({"ess_tokens": 0.1}, 2, "ess_tokens"),
        ({"k3_behavior_policy": 0.5}, 4, "k3_behavior_policy"),
        ({"learning_rate": 1e-3}, 8, "fitted law"),
    ],
)
def test_each_sign_is_named(change, bit, word):
    said = feed(guard(budget=1e-3), [HEALTHY | change] * 4)[-1]
    assert said["guard_signs"] == bit
    assert word in str(explain(said))


def test_lowering_the_rate_halves_it_once_a_window():
    said = feed(guard(action="lower_lr"), [ALIGNED] * 12)
    assert [m["guard_lr_scale"] for m in said] == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]


def test_lowering_the_bound_goes_down_to_synchronous_and_then_to_the_rate():
    said = feed(guard(action="lower_staleness"), [ALIGNED] * 20)
    assert [m["guard_max_staleness"] for m in said[3::4]] == [4, 2, 1, 0, 0]
    assert said[-1]["guard_lr_scale"] == 0.5


def test_a_method_without_behavior_log_probs_is_watched_by_what_it_has():
    assert feed(guard(), [{"grad_cosine": 0.9, "learning_rate": 1e-4}] * 4)[-1]["guard_signs"] == 1


def test_a_lowered_bound_is_in_force_again_before_anything_is_issued(tmp_path: Path):
    lowered = guard(action="lower_staleness")
    feed(lowered, [ALIGNED] * 4)
    (tmp_path / "guard.json").write_text(json.dumps(lowered.state))
    assert (stored_bound(tmp_path, 8), stored_bound(tmp_path, 2), stored_bound(tmp_path / "none", 8)) == (4, 2, 8)
    (tmp_path / "guard.json").write_text(json.dumps(guard().state))
    assert stored_bound(tmp_path, 16) == 16  # a run whose bound was raised before it was resumed
    ledger, learner, rollouts, proximal = MagicMock(), MagicMock(policy_version=3), MagicMock(), MagicMock()
    ledger.recover.return_value = Recovery(0, [], {}, {})
    settings = {"max_staleness": 8, "guarded_bound": 4, "over_bound": "wait", "groups_per_step": 2}
    recover(ledger, learner, rollouts, proximal, **settings, log=print, say=print)
    assert [call[0] for call in rollouts.method_calls] == ["restore", "tighten"]
    rollouts.tighten.assert_called_once_with(4)


def test_a_restored_guard_goes_on_as_if_never_stopped():
    stream = [HEALTHY] * 3 + [ALIGNED] * 13
    whole = feed(guard(action="lower_lr"), stream)
    first, second = guard(action="lower_lr"), guard(action="lower_lr")
    feed(first, stream[:9])
    second.restore(json.loads(json.dumps(first.state)))
    assert feed(second, stream[9:]) == whole[9:]
