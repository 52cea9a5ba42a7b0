import os
from pathlib import Path

import pytest
from runs import small_model


@pytest.fixture(autouse=True)
def _tasks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes of a run too."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))
