"""Benchmarks that stand in for a part of the system keep up with what the system asks of that part."""

import asyncio
import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_cost_of_a_sample_is_measured_with_a_ledger_that_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module("bench_controller")
    milliseconds, audit_s, num_bytes = asyncio.run(bench.measure(tmp_path, 512))
    assert milliseconds > 0 and audit_s > 0 and num_bytes > 100
