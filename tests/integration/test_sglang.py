"""SGLang's adapter beyond the common contract, against a server made from its documentation: not yet a real one."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_sglang import NUM_EXPERTS_CHOSEN, FakeSglang
from harness import KEY, MAX_LENGTH, Sglang, build

from headway.engine.hosting import Client
from headway.engine.messages import EngineSettings
from headway.engine.sglang_server import join_sglang, server_settings
from headway.protocols import EngineDied
from headway.types import Completion, Sampling

torch.set_num_threads(1)

PROMPT = np.array([4, 5, 6, 7], np.int32)
PLAIN = Sampling(max_tokens=6, seed=7)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    harness = Sglang("sglang", tmp_path_factory.mktemp("sglang"))
    yield harness
    harness.close()


def server_of(engine: Sglang) -> FakeSglang:
    assert engine._server is not None
    return engine._server


def test_an_update_pauses_loads_a_folder_with_a_head_of_its_own_and_goes_on(engine: Sglang):
    async def work(client: Client) -> tuple[Completion, int]:
        server_of(engine).log.clear()
        pending = asyncio.ensure_future(client.generate(PROMPT, replace(PLAIN, max_tokens=400)))
        await asyncio.sleep(0.1)
        ref = engine.publish(build(seed=1))
        await client.update_weights(ref)
        return await pending, ref.version

    answer, version = engine.run(work)
    log = server_of(engine).log
    paths = [path for path, _ in log]
    assert paths == ["/generate", "/pause_generation", "/update_weights_from_disk", "/continue_generation", "/generate"]
    folder = Path(log[2][1]["model_path"])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors", "lm_head.safetensors"}
    first, second = log[0][1], log[4][1]
    taken = len(second["input_ids"]) - len(first["input_ids"])
    assert second["input_ids"] == [*PROMPT.tolist(), *answer.token_ids[:taken].tolist()]
    assert second["sampling_params"]["max_new_tokens"] == 400 - taken
    assert answer.versions.tolist() == [version - 1] * taken + [version] * (400 - taken)


def test_routed_experts_cover_prompt_and_response(engine: Sglang):
    answer = engine.run(lambda client: client.generate(PROMPT, replace(PLAIN, record_routing=True)))
    routing = answer.side.routing
    assert routing.shape == (len(PROMPT) + 6, 2, NUM_EXPERTS_CHOSEN)
    np.testing.assert_array_equal(routing[:-1].ravel(), np.arange(routing[:-1].size))
    assert (routing[-1] == -1).all()


def test_experts_that_do_not_fit_the_tokens_are_refused_by_name(engine: Sglang, monkeypatch: pytest.MonkeyPatch):
    engine.run(lambda client: client.status())
    monkeypatch.setattr(server_of(engine), "_num_layers", 1.5)
    with pytest.raises(EngineDied, match=r"routed experts do not cover \d+ tokens × 2"):
        engine.run(lambda client: client.generate(np.array([1, 2], np.int32), replace(PLAIN, record_routing=True)))


def test_weights_the_server_does_not_load_make_it_count_as_dead(engine: Sglang, monkeypatch: pytest.MonkeyPatch):
    engine.run(lambda client: client.status())
    server = server_of(engine)

    async def refuse(body: Any) -> Any:
        return {"success": False, "message": "shapes differ"}

    monkeypatch.setattr(server, "_update_weights_from_disk", refuse)
    with pytest.raises(EngineDied, match="shapes differ"):
        engine.run(lambda client: client.status())
    server._loop.call_soon_threadsafe(setattr, server, "_is_paused", False)


def test_a_running_server_is_joined_and_one_that_is_not_there_is_named(engine: Sglang, tmp_path: Path):
    engine.run(lambda client: client.status())
    settings = EngineSettings(config=str(engine.model), max_slots=2, max_length=MAX_LENGTH)
    host = join_sglang(settings, "engine-0", tmp_path / "engine-0.log", url=server_of(engine).url, key=KEY)

    async def work() -> Completion:
        await host.client.update_weights(engine.publish(build()))
        return await host.client.generate(PROMPT, PLAIN)

    assert len(asyncio.run(work()).token_ids) == 6
    assert host.poll() is None
    host.kill()
    assert host.poll() is not None
    with pytest.raises(RuntimeError, match=r"no healthy SGLang server at http://127.0.0.1:9"):
        join_sglang(settings, "e", tmp_path / "e.log", url="http://127.0.0.1:9", key=KEY, start_timeout_s=0.1)


def test_a_server_is_started_on_loopback_with_seeds_that_count(engine: Sglang):
    settings = server_settings(EngineSettings(config="m", max_slots=2, max_length=9), Path("m"), 5)
    assert settings["host"] == "127.0.0.1"
    assert settings["enable-deterministic-inference"] is True
    assert settings["enable-return-routed-experts"] is False
    assert "api-key" not in settings


def test_a_server_of_a_run_that_replays_routing_is_told_to_record_it_and_sees_its_own_gpus_alone():
    settings = EngineSettings(config="m", max_slots=2, max_length=9, record_routing=True, device="cuda:1,2")
    arguments = server_settings(settings, Path("m"), 5)
    assert arguments["enable-return-routed-experts"] is True and arguments["device"] == "cuda"


def test_experts_that_a_joined_server_does_not_report_are_asked_for_by_the_option(
    engine: Sglang, monkeypatch: pytest.MonkeyPatch
):
    engine.run(lambda client: client.status())
    answer = server_of(engine)._answer

    def without_experts(completion: Completion, num_prompt: int, body: Any) -> Any:
        return answer(completion, num_prompt, body | {"return_routed_experts": False})

    monkeypatch.setattr(server_of(engine), "_answer", without_experts)
    with pytest.raises(EngineDied, match="must be started with --enable-return-routed-experts"):
        engine.run(lambda client: client.generate(PROMPT, replace(PLAIN, record_routing=True)))
