"""The plan of the house: which room may import which, and how large a room may grow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headway"

MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "wire": set(),
    "cache": {"types"},
    "processes": {"wire"},
    "staleness": {"types"},
    "algorithms": {"types"},
    "protocols": {"types"},
    "config": {"staleness"},
    "models": {"types"},
    "ledger": {"types", "wire"},
    "weights": {"types", "protocols", "wire"},
    "engine": {"types", "wire", "protocols", "weights", "models", "processes"},
    "teacher": {"types", "wire", "protocols", "models", "processes"},
    "envs": {"types", "protocols", "wire", "models", "processes"},
    "rollout": {"types", "protocols", "cache"},
    "proximal": {"types", "wire", "protocols", "staleness", "algorithms", "models", "training", "processes"},
    "training": {"types", "protocols", "cache", "algorithms", "models"},
    "report": {"types", "config", "ledger"},
    "planner": {"types", "staleness"},
    "study": {"config", "planner"},
    "integrations": {"types", "algorithms"},
}
"""Room to the rooms below it. `runtime` may import all of these, and `cli` the runtime too."""


def room_of(module: str) -> str:
    name = module.split(".")[1] if "." in module else ""
    if name in ("config_sections", "config_errors"):
        return "config"
    return "ledger" if name in ("accounts", "ledger_checks", "ledger_file", "ledger_recovery") else name


def imported_rooms(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headway"):
            names = [f"headway.{alias.name}" for alias in node.names] if node.module == "headway" else [node.module]
            modules |= set(names)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("headway.")}
    return {room_of(module) for module in modules} - {""}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path):
    room = room_of("headway." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
    if room in ("", "__init__", "cli", "cli_common", "cli_doctor", "cli_studies", "__main__"):
        return
    allowed = set(MAY_IMPORT) if room == "runtime" else MAY_IMPORT[room]
    assert imported_rooms(path) - {room, "errors"} <= allowed


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    long = [
        f"{node.name}: {(node.end_lineno or 0) - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 80
    ]
    assert long == []


UNSAFE = {
    *("eval", "exec", "torch.load", "torch.jit.load", "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("yaml.load", "multiprocessing.connection", "np.load", "numpy.load"),
}
"""Calls and modules that run what they read."""

CARELESS = (
    "0.0.0.0",
    "tcp://*",
    "allow_pickle=True",
    "trust_remote_code=True",
    "shell=True",
    "weights_only=False",
    "cache=True",
)
"""What opens a port to the network, or lets a file or a model bring code of its own."""

WITH_REASON = {"cache=True": [SOURCE / "engine" / "kernels.py"]}
"""numba's: machine code of our own, in the user's own cache."""


def used(text: str) -> set[str]:
    """Functions called, modules imported (with the packages they lie in), and names taken out of modules."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names | modules | {module.split(".")[0] for module in modules}


def test_only_one_file_imports_ray_and_none_unpickles_or_evaluates():
    for path in source_files():
        found = used(path.read_text())
        assert not found & UNSAFE, path
        assert "ray" not in found or path.name == "ray.py", path


@pytest.mark.parametrize("word", CARELESS)
def test_no_port_is_opened_to_the_network_and_no_file_brings_code(word: str):
    assert [path for path in source_files() if word in path.read_text()] == WITH_REASON.get(word, [])


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "import pickle as p", "from pickle import loads", "from pickle import loads as read"),
        *("torch.load(path)", "from torch import load", "eval(text)", "exec(text)", "from dill.session import load"),
    ],
)
def test_no_spelling_of_an_unsafe_import_or_call_is_overlooked(line: str):
    assert used(line) & UNSAFE


@pytest.mark.parametrize("line", ["import ray", "import ray.util", "from ray import remote", "from ray.util import x"])
def test_no_spelling_of_an_import_of_ray_is_overlooked(line: str):
    assert "ray" in used(line)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/overview.md", "docs/staleness.md", "docs/metrics.md", "docs/configuration.md"]
)
def test_the_pages_a_newcomer_needs_exist(name: str):
    assert len((ROOT / name).read_text()) > 1000
