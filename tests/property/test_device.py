"""An accelerator against the CPU: the same tokens, gradients, parameters and files, within what rounding explains.

Skipped without CUDA; HEADWAY_TEST_DEVICE=cpu runs it anyway, the CPU against itself, to try the tests.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_distillation_step import scored_batch
from test_learner import CONFIG, batch
from test_learner_routing import MOE, routed_batch
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from headway.engine.torch_engine import TorchEngine
from headway.models.loading import named_weights
from headway.proximal.scorer import Piece, Scorer
from headway.teacher.messages import Score
from headway.teacher.scorer import Scorer as TeacherScorer
from headway.training.learner import TorchLearner
from headway.training.objectives import DistillationObjective, PolicyObjective
from headway.types import Batch, Sampling
from headway.weights import DiskChannel, MemoryChannel, read_weights

DEVICE = os.environ.get("HEADWAY_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE.startswith("cuda") and not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [np.array([1, 2, 3], np.int32), np.array([4, 5, 6, 7, 8], np.int32), np.array([9], np.int32)]


def build(config: Any = CONFIG, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config) if config is MOE else Qwen3ForCausalLM(config)
    if config is MOE:
        model.set_experts_implementation("eager")
    return model.float().eval().to(device)


def generated(device: str, dtype: torch.dtype, sampling: Sampling, **options: Any) -> list[Any]:
    model = build()
    engine = TorchEngine(model.config, max_slots=8, max_length=64, device=device, dtype=dtype, **options)
    engine.load(named_weights(model), 0)
    return [c for row in engine.generate(PROMPTS, sampling, n=2) for c in row]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, temperature=0.0),
        Sampling(max_tokens=12, seed=3, num_draws=4, num_top=3),
        Sampling(max_tokens=12, seed=3, top_p=0.8, top_k=7, temperature=0.7),
    ],
)
def test_the_engine_gives_the_same_tokens_and_logprobs(sampling: Sampling):
    here, there = (generated(device, torch.float32, sampling) for device in ("cpu", DEVICE))
    for one, two in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)
        np.testing.assert_allclose(one.entropy, two.entropy, atol=1e-3)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_the_engine_runs_in_bfloat16_and_takes_new_weights_in_flight(on_update: Any):
    model = build()
    engine = TorchEngine(
        model.config, max_slots=4, max_length=64, device=DEVICE, dtype=torch.bfloat16, on_update=on_update
    )
    engine.load(named_weights(model), 0)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, Sampling(max_tokens=10, seed=i))
    done = [found for _ in range(4) for found in engine.step()]
    engine.load(named_weights(model), 1)
    while engine.has_work:
        done += engine.step()
    assert sorted(id for id, _ in done) == [0, 1, 2]
    assert all(c.versions.tolist() == [0] * 4 + [1] * 6 for _, c in done)


def trained(device: str, given: list[Batch], config: Any = CONFIG, objective: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "objective": objective or PolicyObjective("grpo", {}),
        "temperature": 1.0,
        "learning_rate": lambda step: 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "gradient_cosine": True,
        "micro_batch_tokens": 30,
        "pad_id": 0,
        "autocast": torch.float32,
    }
    model = build(config, device)
    save: Any = lambda directory: model.save_pretrained(directory)  # noqa: E731
    learner = TorchLearner(model, save_model=save, **settings | options)
    reports = [learner.train(one) for one in given]
    return learner, reports


def assert_alike(one: Any, two: Any) -> None:
    here, there = ({n: t.cpu() for n, t in learner.weights().items()} for learner in (one[0], two[0]))
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=2e-3, atol=2e-4)
    for name in ("loss", "grad_norm", "entropy"):
        assert two[1][0].metrics[name] == pytest.approx(one[1][0].metrics[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "params"),
    [
        *(("grpo", {}), ("estr", {}), ("gspo", {}), ("decoupled_ppo", {}), ("asympo", {}), ("spo", {}), ("m2po", {})),
        *(("sat", {"scope": "batch"}), ("sat_gspo", {"scope": "batch"})),
    ],
)
def test_a_step_changes_the_parameters_alike(algorithm: str, params: dict[str, Any]):
    runs = [trained(device, [batch(1)], objective=PolicyObjective(algorithm, params)) for device in ("cpu", DEVICE)]
    assert_alike(*runs)


def test_a_step_with_replayed_routing_changes_the_parameters_alike():
    given = [routed_batch(1)]
    assert_alike(*(trained(device, given, MOE, routing_replay=True) for device in ("cpu", DEVICE)))


def test_a_checkpoint_of_the_device_continues_to_the_same_bits(tmp_path: Path):
    learner, _ = trained(DEVICE, [batch(1)])
    learner.save(tmp_path)
    learner.train(batch(2, step=1))
    again, _ = trained(DEVICE, [])
    again.model.load_state_dict({**again.model.state_dict(), **load_file(tmp_path / "model.safetensors", DEVICE)})
    again.load(tmp_path)
    again.train(batch(2, step=1))
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_published_weights_arrive_bit_by_bit(kind: str, dtype: torch.dtype, tmp_path: Path):
    tensors = {name: t.to(dtype) for name, t in named_weights(build(device=DEVICE)).items()}
    channel = MemoryChannel(tmp_path) if kind == "memory" else DiskChannel(tmp_path)
    arrived = read_weights(channel.publish(0, tensors))
    assert all(torch.equal(arrived[name], tensor.cpu()) for name, tensor in tensors.items())
    channel.close()


def test_the_proximal_scorer_and_the_teacher_score_alike():
    ids = np.arange(1, 13, dtype=np.int32)
    piece = Piece(ids, np.arange(12) > 3)
    old, taught = [], []
    for device in ("cpu", DEVICE):
        model = build(device=device)
        scorer = Scorer(model, temperature=0.9, micro_batch_tokens=100, autocast=torch.float32)
        kept = {name: (t * 1.01).cpu() for name, t in named_weights(model).items()}
        old.append(scorer.score([piece], kept)[0])
        teacher = TeacherScorer(model, student_vocab_size=20, temperature=1.0, batch_tokens=100, autocast=torch.float32)
        taught.append(teacher.score([Score(1, ids, ids[-4:, None], 3)])[0])
    np.testing.assert_allclose(old[0], old[1], atol=1e-3)
    np.testing.assert_allclose(taught[0].logprobs, taught[1].logprobs, atol=1e-3)
    np.testing.assert_allclose(taught[0].top_logprobs, taught[1].top_logprobs, atol=1e-3)


def test_a_distillation_step_runs_on_the_device():
    runs = [
        trained(device, [scored_batch(1)], objective=DistillationObjective("mc_recomputed", {}))
        for device in ("cpu", DEVICE)
    ]
    assert_alike(*runs)
