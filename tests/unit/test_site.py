"""What Ray is asked to place, and what it is refused."""

from pathlib import Path

import pytest

from headway.config import ConfigError, RunConfig, parse_config
from headway.processes.child import start_child
from headway.runtime import site
from headway.runtime.group import interface_of


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
    }


def test_a_teacher_behind_a_url_is_not_placed():
    assert list(site.bundles(config(distill={"teacher": "http://127.0.0.1:8000"}))) == ["engine-0"]


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
    site.check_site(config(engine="vllm", engines={"url": "http://127.0.0.1:8000"}))


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
