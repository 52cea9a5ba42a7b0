"""A plain vLLM server as the teacher of a distillation, nothing of Headway's in it. `make test-vllm`."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import VLLM_PYTHON
from runs import ledger, records, small_model, train

from headway.engine.hosting import free_port, signal_group, start_server
from headway.models.loading import load_causal_lm
from headway.runtime.teachers import KEY_VARIABLE
from headway.teacher.http import HttpTeacher

pytestmark = pytest.mark.vllm

KEY = "a key for tests"
NAME = "teacher"
ENVIRONMENT = {
    "VLLM_API_KEY": KEY,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("teacher"), head_dim=32)


@pytest.fixture(scope="module")
def url(teacher_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place, url = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{free_port()}"
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(teacher_model)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--dtype", "float32", "--max-model-len", "64", "--max-logprobs", "8", "--enforce-eager"]
    process = start_server(
        command,
        variables=ENVIRONMENT,
        url=url,
        log_path=place / "server.log",
        name=NAME,
        timeout_s=900,
    )
    yield url
    signal_group(process, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(900)
def test_its_scores_are_those_of_the_model(url: str, teacher_model: Path):
    ids = np.array([4, 9, 6, 13, 5, 7, 11, 2], np.int32)
    asked = ids[3:]
    teacher = HttpTeacher(url, model=NAME, key=KEY, vocab_size=64, timeout_s=60, max_failures=1, say=print)

    async def ask():
        try:
            return await teacher.score(ids, asked[:, None], 4)
        finally:
            await teacher.close()

    scores = asyncio.run(ask())
    with torch.no_grad():
        logits = load_causal_lm(teacher_model)(torch.from_numpy(ids)[None].long()).logits[0]
    exact = torch.log_softmax(logits.float(), -1)[2:-1].numpy()
    assert np.abs(scores.logprobs[:, 0] - exact[np.arange(5), asked]).max() < 1e-4
    top = np.sort(exact, axis=1)[:, ::-1][:, :4]
    assert scores.top_logprobs is not None and np.abs(scores.top_logprobs - top).max() < 1e-4


@pytest.mark.timeout(900)
def test_a_run_learns_from_it(
    url: str, teacher_model: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    train(
        tmp_path / "run",
        model,
        num_steps=6,
        distill__teacher=url,
        distill__served_model=NAME,
        distill__tokenizer=str(teacher_model),
        distill__method="forward_kl_teacher_topk",
        distill__top_k=8,
        optimizer__lr=1e-2,
    )
    steps = records(tmp_path / "run", "step")
    assert steps[-1]["distill_loss"] < steps[0]["distill_loss"]
    assert ledger(tmp_path / "run")["samples"]["trained"] == 6 * 16
