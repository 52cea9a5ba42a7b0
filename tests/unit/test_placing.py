"""Engines on the GPUs of one machine: who computes where, and what does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import ConfigError, RunConfig, parse_config
from headway.engine.gpus import num_gpus, visible_gpus
from headway.engine.messages import EngineSettings
from headway.runtime import launch
from headway.runtime.channels import broadcast_backend
from headway.runtime.placing import engine_devices, learner_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(num: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)

    return have


def config(num_engines: int, engine: str = "torch", device: str = "cuda", num_ranks: int = 1, **more: Any) -> RunConfig:
    engines = {"num_engines": num_engines, "device": device, **more.pop("engines", {})}
    learner = {"num_ranks": num_ranks, "device": more.pop("learner", "cuda")}
    return parse_config({"engine": engine, "engines": engines, "learner": learner, **more})


@pytest.mark.parametrize(
    ("num_gpus", "settings", "devices"),
    [
        (4, config(3), ["cuda:1", "cuda:2", "cuda:3"]),
        (4, config(3, num_ranks=2), ["cuda:2", "cuda:3", "cuda:2"]),
        (2, config(3, num_ranks=2), ["cuda:0", "cuda:1", "cuda:0"]),
        (2, config(2, learner="cpu"), ["cuda:0", "cuda:1"]),
        (3, config(2, learner="cuda:1"), ["cuda:0", "cuda:2"]),
        (1, config(2), ["cuda:0", "cuda:0"]),
        (4, config(2, device="cuda:3"), ["cuda:3", "cuda:3"]),
        (4, config(2, device="cpu"), ["cpu", "cpu"]),
        (0, config(2), ["cuda", "cuda"]),
        (0, config(2, device="auto"), ["cpu", "cpu"]),
        (2, config(2, device="auto", learner="auto"), ["cuda:1", "cuda:1"]),
        (4, config(2, runtime="ray"), ["cuda", "cuda"]),
        (3, config(2, "vllm"), ["cuda:1", "cuda:2"]),
        (2, config(2, "vllm"), ["cuda:0", "cuda:1"]),
        (8, config(2, "vllm", engines={"server_args": ["--tensor-parallel-size", "2"]}), ["cuda:1,2", "cuda:3,4"]),
        (4, config(2, "sglang", engines={"server_args": ["--tp=2"]}), ["cuda:0,1", "cuda:2,3"]),
        (4, config(1, "vllm", device="cuda:2"), ["cuda:2"]),
    ],
)
def test_engines_share_out_what_the_learner_leaves(gpus: Any, num_gpus: int, settings: RunConfig, devices: list[str]):
    gpus(num_gpus)
    assert engine_devices(settings) == devices


@pytest.mark.parametrize(
    ("num_gpus", "settings", "complaint"),
    [
        (
            2,
            config(3, "vllm"),
            r"engines.num_engines = 3 vllm servers of 1 GPU.*this machine has 2; set it to at most 2",
        ),
        (3, config(2, "sglang", engines={"server_args": ["--tp", "2"]}), r"of 2 GPU.*set it to at most 1"),
        (4, config(2, "vllm", device="cuda:1"), r'"cuda:1" is the GPU of every engine.*cannot share'),
        (2, config(1, device="cuda:2"), r'"cuda:2", but this machine has 2'),
        (2, config(1, device="cuda:x"), r'"cuda:x", but this machine has 2'),
        (4, config(1, device="cuda:1,2"), "a built-in engine computes on one GPU"),
        (4, config(1, "vllm", engines={"server_args": ["--tp", "two"]}), r"engines.server_args: .*'two'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(gpus: Any, num_gpus: int, settings: RunConfig, complaint: str):
    gpus(num_gpus)
    with pytest.raises(ConfigError, match=complaint):
        launch.check_engine(settings)


@pytest.mark.parametrize(
    ("num_gpus", "settings", "backend"),
    [
        (3, config(2), "nccl"),
        (3, config(3), "gloo"),
        (2, config(2, num_ranks=2), "gloo"),
        (3, config(2, runtime="ray"), "gloo"),
        (3, config(2, learner="cpu"), "gloo"),
        (1, config(1), "gloo"),
    ],
)
def test_nccl_is_for_learner_and_engines_with_gpus_of_their_own(
    gpus: Any, num_gpus: int, settings: RunConfig, backend: str
):
    gpus(num_gpus)
    assert broadcast_backend(learner_device(settings), engine_devices(settings)) == backend


@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang"])
def test_each_engine_is_started_on_its_own_device(engine: str, gpus: Any, monkeypatch: pytest.MonkeyPatch):
    gpus(3)
    started: list[tuple[str, str]] = []

    def start(settings: EngineSettings, name: str, log_path: Path, **_: Any) -> None:
        started.append((name, settings.device))

    monkeypatch.setattr(launch, "start_engine", start)
    monkeypatch.setitem(launch.SERVERS, engine, (start, start))
    starts = launch.launcher(config(2, engine), EngineSettings(config="m", max_slots=2, max_length=9))
    for name in ("engine-1", "engine-0"):
        starts(name, Path("log"))
    assert started == [("engine-1", "cuda:2"), ("engine-0", "cuda:1")]


def test_a_server_sees_its_own_gpus_alone_of_those_that_this_process_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("cuda:1,2") == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a,6")
    assert visible_gpus("cuda:1,2") == {"CUDA_VISIBLE_DEVICES": "GPU-5a,6"}
    assert visible_gpus("cuda") == visible_gpus("cpu") == {}


def test_options_of_parallel_servers_multiply():
    assert num_gpus([]) == num_gpus(["--seed", "3", "--tp"]) == 1
    assert num_gpus(["--tensor-parallel-size=2", "-pp", "3", "--seed", "5"]) == 6


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://127.0.0.1", "http://", "http://a:b"])
def test_an_address_of_a_server_that_is_no_url_is_refused_by_name(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_ENGINE_KEY", "k")
    with pytest.raises(ConfigError, match=r"engines\.url: "):
        launch.check_engine(config(1, "vllm", device="cpu", engines={"url": url}))
