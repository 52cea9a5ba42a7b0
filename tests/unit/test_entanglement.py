"""What `scripts/entanglement.py` calls the truth, and how it judges by it."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_proximal_sources import CONFIG, batch, copied, exact, learner
from transformers import Qwen3ForCausalLM

from headway.engine.rounding import round_weights

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("entanglement")


def test_the_truth_is_each_tokens_own_version_rounded_and_not(script: Any):
    one, given = learner(), batch(1, [0, 0, -1, 1])
    truth = script.Truth(Qwen3ForCausalLM(CONFIG), 1.0, "int8")
    taken = [copied(one)]
    truth.learn(0, one.weights(), oldest=-1)
    one.train(batch(0, [0] * 4))
    taken.append(copied(one))
    truth.learn(1, one.weights(), oldest=0)
    found = truth.columns(given)
    mask = np.concatenate([r.mask for r in given.responses])
    served = [round_weights(each, "int8") for each in taken]
    np.testing.assert_allclose(found["true_exact"], exact(taken, given)[mask], atol=2e-6)
    np.testing.assert_allclose(found["true_rounded"], exact(served, given)[mask], atol=2e-6)
    newest = exact([taken[1]] * 2, given)[mask]
    np.testing.assert_allclose(found["true_current"], newest, atol=2e-6)
    assert np.abs(found["true_exact"] - newest).max() > 1e-2
    assert np.abs(found["true_exact"] - found["true_rounded"]).max() > 1e-4


def test_a_leak_is_found_with_its_error_and_a_sound_source_has_none(script: Any):
    rng = np.random.default_rng(0)
    discrepancy, staleness, noise = 0.01 * rng.normal(size=500), rng.normal(size=500), 0.001 * rng.normal(size=500)
    for leak in (0.0, 0.7):
        log_rd = discrepancy + leak * staleness + noise
        found = script.judge(
            {
                "log_rd": log_rd,
                "log_rs": discrepancy + staleness - log_rd,
                "discrepancy": discrepancy,
                "staleness": staleness,
                "error": noise,
            }
        )
        assert found["leak_error"] == pytest.approx(0.001 / np.sqrt(500), rel=0.2)
        assert abs(found["leak"] - leak) < 4 * found["leak_error"]
        assert found["follows"] == pytest.approx(1, abs=0.02)
        assert found["farthest"] == pytest.approx(np.abs(noise).max())
