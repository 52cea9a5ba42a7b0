"""`scripts/routing_gap.py` against plain `transformers`, with experts that differ and that do not."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_routing import experts_by_transformers, make_engine
from tiny_models import build_model

from headway.types import Batch, Group, Prompt, Sampling

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("routing_gap")


def answered(script: Any) -> Batch:
    """Two groups of three, by an engine with the weights of seed 0."""
    prompts = [np.array(ids, np.int32) for ids in ([4, 5, 6], [7, 8, 9, 10])]
    sampling = Sampling(max_tokens=12, seed=3, record_routing=True)
    completions = make_engine(build_model("qwen3_moe")).generate(prompts, sampling, n=3)
    pairs = enumerate(zip(prompts, completions, strict=True))
    return Batch(0, 0, tuple(script._group(i, Prompt(i, "train", ids), some) for i, (ids, some) in pairs))


def test_equal_weights_have_no_gap_and_the_same_experts(script: Any):
    found = script.compare(build_model("qwen3_moe"), answered(script))
    assert found["on"]["routing_agreement"] == 1
    assert found["on"]["max_abs_delta"] < 1e-5 and found["off"]["max_abs_delta"] < 1e-5


def test_other_weights_have_the_gap_of_plain_transformers_and_replay_takes_part_of_it(script: Any):
    batch, model = answered(script), moved()
    found = script.compare(model, batch)
    deltas, same = plain_gap(model, batch.groups)
    assert found["tokens"] == len(deltas)
    assert found["off"]["mean_abs_delta"] == pytest.approx(np.abs(deltas).mean(), rel=1e-4)
    assert found["off"]["max_abs_delta"] == pytest.approx(np.abs(deltas).max(), rel=1e-4)
    assert found["on"]["routing_agreement"] == pytest.approx(same, abs=1e-6)
    assert 0.5 < same < 1
    assert found["on"]["mean_abs_delta"] < 0.99 * found["off"]["mean_abs_delta"]


def moved() -> Any:
    """The engine's model after a change of its routers alone: only experts and gates differ."""
    model = build_model("qwen3_moe")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.gate." in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def plain_gap(model: Any, groups: tuple[Group, ...]) -> tuple[np.ndarray, float]:
    """log πθ − log μ of every token, and the share of (token, layer) with the same set of experts."""
    deltas, same = [], []
    for group in groups:
        for response in group.responses:
            tokens = np.concatenate([group.prompt.token_ids, response.token_ids])
            ids, before = torch.from_numpy(tokens).long(), len(group.prompt.token_ids)
            every = torch.log_softmax(model(ids[None]).logits[0, before - 1 : -1], -1)
            deltas.append(every.gather(1, ids[before:, None])[:, 0].numpy() - response.behavior_logprobs)
            own, routing = experts_by_transformers(model, tokens), response.side.routing
            assert routing is not None
            same.append((np.sort(own[:-1], -1) == np.sort(routing[:-1], -1)).all(-1).ravel())
    return np.concatenate(deltas), float(np.concatenate(same).mean())
