"""What Ray is asked to place, and what it is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from headway.config import ConfigError, RunConfig, parse_config
from headway.processes.child import start_child
from headway.runtime import site
from headway.runtime.group import interface_of
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import Task


def config(**values: object) -> RunConfig:
    return parse_config({"runtime": "ray", **values})


def test_every_server_of_a_run_has_its_place_under_the_name_of_its_log():
    found = site.bundles(
        config(
            algorithm="decoupled_ppo",
            proximal="exact_model",
            engines={"num_engines": 2, "num_threads": 3, "device": "cpu"},
            learner={"num_ranks": 3, "num_threads": 2, "device": "cuda"},
            distill={"teacher": "tiny:3m", "device": "cpu"},
            task={"num_workers": 2},
        )
    )
    trains = {"CPU": 2, "GPU": 1}
    assert found == {
        "engine-0": {"CPU": 3},
        "engine-1": {"CPU": 3},
        "learner-rank-1": trains,
        "learner-rank-2": trains,
        "old-logit-worker": trains,
        "teacher": {"CPU": 1},
        "environment-0": {"CPU": 1},
        "environment-1": {"CPU": 1},
    }


def test_a_teacher_behind_a_url_is_not_placed():
    assert list(site.bundles(config(distill={"teacher": "http://127.0.0.1:8000"}))) == ["engine-0"]


def test_a_joined_engine_is_not_placed():
    joined = config(engine="vllm", engines={"url": "http://127.0.0.1:8000"}, distill={"teacher": "tiny:3m"})
    assert list(site.bundles(joined)) == ["teacher"]


@pytest.mark.parametrize(
    ("values", "mend"),
    [
        ({"ray": {"address": "ray://10.0.0.1:10001"}}, r'start Headway on a node of the cluster, with .*"auto"'),
        ({"engines": {"device": "cuda:1"}}, r'engines\.device = "cuda:1".*set it to "cuda"'),
        ({"distill": {"teacher": "tiny:3m", "device": "cuda:0"}}, r'distill\.device = "cuda:0".*set it to "cuda"'),
        ({"engine": "vllm", "engines": {"url": "http://127.0.0.1:8000"}}, r'nothing to place.*set runtime = "local"'),
    ],
)
def test_what_ray_cannot_place_is_refused_with_the_mend(
    values: dict[str, object], mend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(site, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=mend):
        site.check_site(config(**values))


def test_the_device_of_what_is_not_placed_may_be_a_certain_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site, "find_spec", lambda name: object())
    site.check_site(config(learner={"device": "cuda:1"}, engines={"device": "cuda"}))


def test_local_models_are_copied_once_to_where_every_node_finds_them(tmp_path: Path):
    model, folder = tmp_path / "model", RunFolder(tmp_path / "run")
    model.mkdir()
    (model / "config.json").write_text("{}")
    task: Any = Task(environment=None, tokenizer=None, model=str(model), decode=str, teacher="org/name")  # pyright: ignore
    ranks = {"num_ranks": 2, "device": "cpu"}
    draft = folder.path / "models" / "model.partial"
    draft.mkdir(parents=True)  # as a kill in the middle leaves it
    found = [site.models_for_all(config(learner=ranks), task, folder) for _ in range(2)]
    assert found[0] == found[1] and found[0].teacher == "org/name"
    assert Path(found[0].model, "config.json").is_file() and folder.path in Path(found[0].model).parents
    assert not draft.exists()
    assert site.models_for_all(config(), task, folder) == task
    assert site.models_for_all(config(runtime="local", learner=ranks), task, folder) == task


def test_shared_memory_is_refused_on_another_node_alone():
    site._check_place(config(), "engine-0", "ab12", is_here=True)
    site._check_place(config(), "learner-rank-1", "ab12", is_here=False)
    site._check_place(config(weights="disk"), "engine-0", "ab12", is_here=False)
    with pytest.raises(
        ConfigError, match=r'weights = "memory" is .* engine-0 on node ab12; set weights to "collective"'
    ):
        site._check_place(config(), "engine-0", "ab12", is_here=False)


def test_ray_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[ray\]'"):
        site.check_site(config())
    site.check_site(config(runtime="local"))


def test_a_server_of_another_kind_is_joined_not_placed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"start vllm yourself and give engines\.url"):
        site.check_site(config(engine="vllm"))
    with_teacher = {"distill": {"teacher": "tiny:3m"}}
    site.check_site(config(engine="vllm", engines={"url": "http://127.0.0.1:8000"}, **with_teacher))


def test_a_run_without_ray_starts_its_servers_here():
    assert site.HERE.spawn is start_child and site.HERE.host == "127.0.0.1"


def test_the_interface_of_loopback_is_found_and_a_foreign_address_refused():
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 is no address of this machine"):
        interface_of("203.0.113.7")


def test_a_server_listens_where_it_is_told_and_only_there(tmp_path: Path):
    program = tmp_path / "served.py"
    program.write_text(
        "import time\n"
        "from headway.processes.router import announce, bound_router\n"
        "with bound_router() as socket:\n"
        "    announce(socket, lambda: None)\n"
        "    time.sleep(60)\n"
    )
    child = start_child(
        "served",
        {"PYTHONPATH": f"{tmp_path}:{Path(site.__file__).parents[2]}"},
        what="a server",
        log_path=tmp_path / "log",
        start_timeout_s=60,
        host="127.0.0.2",
    )
    try:
        assert child.endpoint.startswith("tcp://127.0.0.2:")
    finally:
        child.kill()
        child.process.wait()


def test_a_start_under_ray_is_given_up_once_it_is_not_wanted_any_more(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    placed = importlib.import_module("headway.runtime.ray")
    monkeypatch.setattr(placed.ray, "wait", lambda answers, timeout: ([], answers))
    asked = iter([True, True, False])
    with pytest.raises(placed.GetTimeoutError):
        placed._get("answer", 60.0, lambda: next(asked))
    with pytest.raises(placed.GetTimeoutError):
        placed._get("answer", 0.0, lambda: True)
    monkeypatch.setattr(placed.ray, "wait", lambda answers, timeout: (answers, []))
    monkeypatch.setattr(placed.ray, "get", lambda answer: f"{answer} itself")
    assert placed._get("answer", 60.0, lambda: True) == "answer itself"
