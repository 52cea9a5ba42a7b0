"""Faults done to whole runs, as `make chaos` does them all; a few of every kind in the default suite."""

from pathlib import Path

import pytest
from chaos import undergo
from chaos_faults import FAULTS

QUICK = {"engine_garbled", "weights_corrupt", "disk_full", "nan_weights", "env_blocks"}


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_run_survives(name: str, model: Path, tmp_path: Path):
    outcome = undergo(FAULTS[name], tmp_path / name, model)
    assert outcome.survived and not outcome.note, outcome.note
    assert outcome.num_faults > 0, "nothing was broken"
    assert outcome.lost == 0 and outcome.num_hangs == 0
