"""What only vLLM shows: a head that an update does not reach, a whole run, a dead server. `make test-vllm`."""

import asyncio
import json
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from harness import MAX_LENGTH, VLLM_PYTHON, Vllm, build
from runs import Running, ledger, records, small_model, train_arguments, wait_for

from headway.engine.conformance import TOLERANCE, Conformance, EngineDisagrees
from headway.engine.hosting import free_port, signal_group, start_server
from headway.engine.messages import EngineSettings
from headway.engine.vllm import ServerRefused, VllmEngine
from headway.engine.vllm_server import SERVER, client_options, join_vllm, server_arguments, server_environment
from headway.types import WeightRef

pytestmark = pytest.mark.vllm
torch.set_num_threads(1)

KEY = "a key for tests"
PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [30], [11, 12])]


class NaiveVllm(VllmEngine):
    """Updates as one would at first: point vLLM's own `reload_weights` at a folder of the tied model."""

    folder: Path

    async def _swap(self, ref: WeightRef) -> None:
        shutil.copy2(ref.path, self.folder / "model.safetensors")
        await self._http.post("/pause?mode=keep&clear_cache=true")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        await self._http.post("/collective_rpc", call)
        await self._http.post("/update_weight_version", {"new_version": str(ref.version)})
        await self._http.post("/resume")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A server of the model as it is, embeddings tied, which the adapter would never start."""
    harness = Vllm("vllm", tmp_path_factory.mktemp("tied"))
    settings = EngineSettings(config=str(harness.model), max_slots=8, max_length=MAX_LENGTH)
    harness._url, harness._key = f"http://127.0.0.1:{free_port()}", KEY
    process = start_server(
        [VLLM_PYTHON, "-m", SERVER, *server_arguments(settings, harness.model, harness._url)],
        variables=server_environment(settings, harness.place, KEY),
        url=harness._url,
        log_path=harness.place / "engine.log",
        name="tied",
        timeout_s=900,
    )
    yield harness
    signal_group(process, signal.SIGKILL)
    process.wait()


def test_the_conformance_check_catches_a_tied_head_that_an_update_does_not_reach(tied: Vllm):
    first, second = build(seed=0), build(seed=0)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    models = iter((first, second))

    def score() -> Any:
        model = next(models)
        rows = [model(torch.from_numpy(p)[None].long()).logits[0, -1] for p in PROMPTS]
        return torch.log_softmax(torch.stack(rows), -1).detach().numpy()

    async def work() -> float:
        settings = EngineSettings(config=str(tied.model), max_slots=8, max_length=MAX_LENGTH)
        client = NaiveVllm(tied._url, key=KEY, **client_options(settings, "vllm", 60.0))
        client.folder = tied.place / "naive"
        shutil.copytree(tied.model, client.folder)
        check = Conformance(PROMPTS, score=score, every=1, tolerance=TOLERANCE["float32"])
        for model in (first, second):
            ref = tied.publish(model)
            check.remember(ref.version)
            await client.update_weights(ref)
            await check.check(ref.version, {"engine-0": client})
        return 0.0

    with pytest.raises(EngineDisagrees, match=r"engine-0 says it holds version 2.*tied head"):
        asyncio.run(work())


def test_a_server_of_tied_embeddings_is_not_joined(tied: Vllm):
    settings = EngineSettings(config=str(tied.model), max_slots=8, max_length=MAX_LENGTH)
    with pytest.raises(ServerRefused, match=r"tied embeddings.*vllm_server MODEL FOLDER"):
        join_vllm(settings, "vllm", tied.place / "log", url=tied._url, key=KEY)


def test_no_endpoint_but_health_answers_without_the_key(tied: Vllm):
    for method, path in (("POST", "/collective_rpc"), ("POST", "/pause"), ("GET", "/metrics"), ("GET", "/v1/models")):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(tied._url + path, method=method))
    assert urllib.request.urlopen(tied._url + "/health").status == 200


@pytest.mark.timeout(3000)
def test_a_run_on_vllm_agrees_with_the_learner_and_survives_the_death_of_its_server(tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run,
        small_model(tmp_path / "model", head_dim=32),  # vLLM's CPU build runs no smaller heads
        optimizer__lr=1e-2,
        optimizer__weight_decay=1.0,  # the weights move even while no answer is right
        engine="vllm",
        engines__python=VLLM_PYTHON,
        engines__start_timeout_s=900,
        task__latency_s=0.5,
        num_steps=30,
    )
    running = Running.start(*arguments, log=log)
    wait_for(lambda: steps(run) >= 3 or running.process.poll() is not None, limit_s=1200, what="third step")
    assert running.process.poll() is None, log.read_text()[-2000:]
    (server,) = servers(running)
    tree = [server, *server.children(recursive=True)]
    server.kill()
    wait_for(lambda: running.process.poll() is not None, limit_s=1500, what="end of the run")
    assert running.process.returncode == 0, log.read_text()[-3000:]
    assert ledger(run)["samples"]["trained"] == 30 * 16
    made = records(run, "step")
    assert made[-1]["num_restarts"] == 1
    assert all(step["conformance_delta"] < 1e-4 for step in made), json.dumps(made[-1])
    assert made[-1]["mean_abs_delta"] < 1.0
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def steps(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0


def servers(running: Running) -> list[psutil.Process]:
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if SERVER in " ".join(child.cmdline())]
