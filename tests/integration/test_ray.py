"""Runs whose servers Ray places: on this machine, and on nodes of a cluster that is simulated here; nodes are lost."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Running, ledger, records, train_arguments, wait_for

from headway.config import ConfigError

cluster_utils = pytest.importorskip("ray.cluster_utils")

STEPS = 60
TWO_ENGINES = {"runtime": "ray", "ray__strategy": "SPREAD", "engines__num_engines": 2, "task__latency_s": 0.1}


SMALL_STORE = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def head() -> Iterator[Any]:
    """A head without room for servers, where runs are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL_STORE}
        )
        made.nodes = []
        yield made
        made.shutdown()


@pytest.fixture
def cluster(head: Any) -> Any:
    """And two nodes with room for four servers each."""
    while len(head.nodes) < 2:
        head.nodes.append(head.add_node(num_cpus=4, **SMALL_STORE))
    return head


def lose(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)
    cluster.nodes.remove(node)


def servers(cluster: Any, module: str) -> list[psutil.Process]:
    """Processes that serve a run on the cluster's nodes: actors are children of a node's raylet, servers of actors."""
    return [process for node in cluster.nodes for process in _below(node) if module in process.cmdline()]


def node_of(cluster: Any, server: psutil.Process) -> Any:
    return next(node for node in cluster.nodes if server in _below(node))


def _below(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [p for p in raylet.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def started(cluster: Any, model: Path, tmp_path: Path, **settings: object) -> tuple[Running, Path, Path]:
    """A run that has made a few steps."""
    run, log = tmp_path / "run", tmp_path / "log"
    settings = TWO_ENGINES | {"ray__address": cluster.address, "num_steps": STEPS} | settings
    running = Running.start(*train_arguments(run, model, **settings), log=log)
    wait_for(lambda: steps_of(run) >= 3, limit_s=150, what=f"first steps: {log.read_text()[-3000:]}")
    return running, run, log


def steps_of(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0


def end_of(running: Running, log: Path, code: int = 0) -> str:
    wait_for(lambda: running.process.poll() is not None, limit_s=200, what=f"end: {log.read_text()[-3000:]}")
    text = " ".join(log.read_text().split())
    assert running.process.returncode == code, text
    return text


def adds_up(run: Path, steps: int = STEPS) -> None:
    audit = ledger(run)
    assert audit["samples"]["trained"] == audit["samples_issued"] == steps * 16
    assert [record["step"] for record in records(run, "step")] == list(range(steps))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_under_ray_on_one_machine_adds_up(model: Path, tmp_path: Path):
    """In a process of its own: Ray stays loaded in the one that used it."""
    run, log = tmp_path / "run", tmp_path / "log"
    few = {"num_steps": 4, "evaluation__every": 0, "evaluation__test_size": 0}
    arguments = train_arguments(run, model, runtime="ray", ray__address="local", **few)
    text = end_of(Running.start(*arguments, log=log), log)
    assert "placed by Ray: engine-0 on" in text
    assert ledger(run)["samples"]["trained"] == 4 * 16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_engine_actor_is_replaced(cluster: Any, model: Path, tmp_path: Path):
    running, run, log = started(cluster, model, tmp_path, weights="collective")
    engines = servers(cluster, "headway.engine.server")
    assert len({node_of(cluster, engine).unique_id for engine in engines}) == 2
    actor = engines[0].parent()
    assert actor is not None
    actor.send_signal(signal.SIGKILL)
    wait_for(lambda: not engines[0].is_running(), limit_s=20, what="end of the engine without its actor")
    text = end_of(running, log)
    assert "died (exit -1); restarting it and asking again" in text
    assert records(run, "step")[-1]["num_restarts"] == 1
    adds_up(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_of_a_lost_node_moves_to_another(cluster: Any, model: Path, tmp_path: Path):
    steps = 6 * STEPS  # Ray takes its time to place the engine anew
    running, run, log = started(cluster, model, tmp_path, weights="delta", num_steps=steps)
    lost = node_of(cluster, servers(cluster, "headway.engine.server")[0])
    lose(cluster, lost)
    text = end_of(running, log)
    assert "died (exit -1); restarting it and asking again" in text
    assert min(record["num_engines_serving"] for record in records(run, "step")) == 1
    assert records(run, "step")[-1]["num_engines_serving"] == 2
    adds_up(run, steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_learner_rank_ends_the_run_by_name_and_it_resumes(cluster: Any, model: Path, tmp_path: Path):
    running, run, log = started(cluster, model, tmp_path, weights="disk", learner__num_ranks=2)
    [rank] = servers(cluster, "headway.runtime.follower")
    os.kill(rank.pid, signal.SIGKILL)
    text = end_of(running, log, code=1)
    assert "learner rank 1 died (exit -9)" in text and "headway resume" in text

    log.write_text("")
    running = Running.start("resume", run, log=log)
    wait_for(lambda: servers(cluster, "headway.runtime.follower"), limit_s=100, what="the rank's return")
    before = steps_of(run)
    wait_for(lambda: steps_of(run) >= before + 3, limit_s=150, what=f"more steps: {log.read_text()[-3000:]}")
    lost = node_of(cluster, servers(cluster, "headway.runtime.follower")[0])
    lose(cluster, lost)
    assert "learner rank 1 died (exit -1)" in end_of(running, log, code=1)

    log.write_text("")
    end_of(Running.start("resume", run, log=log), log)
    adds_up(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_teacher_and_old_logit_worker_are_placed_and_replaced(cluster: Any, model: Path, tmp_path: Path):
    running, run, log = started(
        cluster,
        model,
        tmp_path,
        weights="disk",
        algorithm="decoupled_ppo",
        proximal="exact_model",
        distill__teacher=str(model),
        distill__num_draws=4,
        distill__reward_weight=1.0,
    )
    for module in ("headway.teacher.server", "headway.proximal.server"):
        [server] = servers(cluster, module)
        assert node_of(cluster, server) in cluster.nodes
        actor = server.parent()
        assert actor is not None
        actor.send_signal(signal.SIGKILL)
    text = end_of(running, log)
    assert "the teacher died (exit -1)" in text and "the old-logit worker died or did not answer" in text
    adds_up(run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shared_memory_across_nodes_is_refused_before_anything_starts(cluster: Any, model: Path, tmp_path: Path):
    settings = TWO_ENGINES | {"ray__address": cluster.address, "weights": "memory"}
    log = tmp_path / "log"
    running = Running.start(*train_arguments(tmp_path / "run", model, **settings), log=log)
    text = end_of(running, log, code=1)
    assert 'weights = "memory" is shared memory of one machine' in text and 'set weights to "collective"' in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_without_room_is_named_with_what_it_has(cluster: Any, model: Path, tmp_path: Path):
    settings = {"ray__address": cluster.address, "engines__num_engines": 9, "ray__place_timeout_s": 5}
    log = tmp_path / "log"
    running = Running.start(*train_arguments(tmp_path / "run", model, **TWO_ENGINES | settings), log=log)
    text = end_of(running, log, code=1)
    assert "needed {'CPU': 9}, free {'CPU': 8.0} of {'CPU': 8.0}" in text


@pytest.mark.timeout(120)
def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch):
    from headway.runtime import ray as placing

    def waits_for_minutes(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray itself was asked")

    monkeypatch.setattr(placing.ray, "init", waits_for_minutes)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"ray.address = '{address}': no Ray cluster answers there"):
        placing.Cluster(address, {"engine-0": {"CPU": 1}}, strategy="PACK", timeout_s=5, check_place=lambda *_: None)
