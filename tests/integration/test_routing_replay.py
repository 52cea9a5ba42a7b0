"""Routing replay from end to end: through interruptions and tools, and through a whole recorded run."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import assert_moving, headway, ledger, records, small_mixture, train
from test_engine_routing import experts_by_transformers, make_engine
from tiny_models import build_model, weights_of

from headway.config import ConfigError, parse_config
from headway.engine.torch_engine import TorchEngine
from headway.envs.turns import Turn
from headway.rollout import run_episode
from headway.runtime.checks import check
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.task import Task
from headway.types import Completion, EngineStatus, Ints, LogprobOrigin, Prompt, Sampling, Split, WeightRef

torch.set_num_threads(1)


@dataclass
class InterruptedEngine:
    """The built-in engine in process, interrupted after every few tokens."""

    engine: TorchEngine
    rng: np.random.Generator
    num_interrupts: int = 0

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        self.engine.submit(0, token_ids, sampling)
        for _ in range(int(self.rng.integers(1, 5))):
            for _, completion in self.engine.step():
                return completion
        self.num_interrupts += 1
        return dict(self.engine.interrupt())[0]

    async def update_weights(self, ref: WeightRef) -> None: ...
    async def interrupt(self) -> None: ...
    async def status(self) -> EngineStatus:
        return self.engine.status

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        return LogprobOrigin("behavior", "torch", "float32", sampling.temperature)


@dataclass
class ThreeTurns:
    """Shows three tokens after every turn but the last."""

    stop_token_ids: tuple[int, ...] = (0,)
    shown: list[Ints] = field(default_factory=lambda: [np.array([31, 32, 33], np.int32)])

    def size(self, split: Split) -> int:
        return 1

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, split, np.array([4, 5, 6, 7], np.int32))

    def start(self, prompt: Prompt) -> Any:
        return self

    async def step(self, text: str) -> Turn:
        return Turn(0.5, "shown")

    def observe(self, text: str, after_stop: bool) -> Ints:
        return self.shown[0]


@pytest.mark.parametrize("seed", range(3))
def test_routing_of_an_interrupted_episode_with_tools_covers_every_token_once(seed: int):
    model = build_model("qwen3_moe")
    engine = InterruptedEngine(make_engine(model), np.random.default_rng(seed))
    environment: Any = ThreeTurns()
    prompt = environment.prompt("train", 0)
    episode = run_episode(
        engine,
        environment,
        prompt,
        Sampling(max_tokens=9, seed=seed, record_routing=True),
        decode=str,
        max_response_tokens=40,
        max_turns=3,
    )
    response = asyncio.run(episode)
    assert engine.num_interrupts > 2 and not response.mask.all()
    routing = response.side.routing
    assert routing is not None and len(routing) == len(prompt.token_ids) + len(response.token_ids)
    tokens = np.concatenate([prompt.token_ids, response.token_ids])
    assert np.array_equal(routing[:-1], experts_by_transformers(model, tokens)[:-1])
    assert (routing[-1] == -1).all()


def test_tokens_sampled_before_an_interruption_keep_the_experts_they_were_sampled_with():
    before, after = build_model("qwen3_moe", seed=0), build_model("qwen3_moe", seed=1)

    class Updated(InterruptedEngine):
        async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
            completion = await super().generate(token_ids, sampling)
            self.engine.load(weights_of(after), 1)
            return completion

    engine = Updated(make_engine(before), np.random.default_rng(0))
    environment: Any = ThreeTurns()
    prompt = environment.prompt("train", 0)
    sampling = Sampling(max_tokens=20, seed=5, record_routing=True)
    episode = run_episode(engine, environment, prompt, sampling, decode=str, max_response_tokens=20, max_turns=1)
    response = asyncio.run(episode)
    routing = response.side.routing
    assert routing is not None and set(response.versions.tolist()) == {0, 1}
    passed = len(prompt.token_ids) + int((response.versions == 0).sum()) - 1
    tokens = np.concatenate([prompt.token_ids, response.token_ids])
    assert np.array_equal(routing[:passed], experts_by_transformers(before, tokens)[:passed])
    assert np.array_equal(routing[passed:-1], experts_by_transformers(after, tokens)[passed:-1])


def test_a_run_with_replay_repeats_bit_by_bit_and_reports_its_agreement(tmp_path: Path):
    run, model = tmp_path / "run", small_mixture(tmp_path / "model")
    train(
        run,
        model,
        algorithm="sat_gspo",
        routing_replay=True,
        record=True,
        engines__on_update="interrupt",
        exact_lag=True,  # the last two steps train tokens that are two versions old, however fast the engine is
        optimizer__lr=1e-3,
        num_steps=4,
        evaluation__every=0,
        evaluation__test_size=0,
        checkpoint__every=2,
    )
    assert ledger(run)["samples"]["trained"] == 4 * 16
    shares = [step["routing_agreement"] for step in records(run, "step")]
    assert len(shares) == 4 and all(0.5 < share <= 1 for share in shares)
    assert shares[0] > 0.999, "at version 0 both sides hold the same weights"
    assert min(shares) < 0.999, "later, responses of an older version were routed otherwise"
    assert_moving(run)
    for step in recorded_steps(run / "batches"):
        for group in read_batch(run / "batches", step).groups:
            for response in group.responses:
                routing = response.side.routing
                assert routing is not None and routing.dtype == np.int8
                assert routing.shape == (len(group.prompt.token_ids) + len(response.token_ids), 2, 2)
    result = headway("replay", run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "replayed 4 steps; checkpoints of versions 2, 4: bit-identical" in result.stdout


def test_replay_on_a_dense_model_is_refused_with_the_mend(model: Path):
    config = parse_config({"routing_replay": True, "model": {"path": str(model)}})
    environment: Any = None
    task = Task(environment, tokenizer=None, model=str(model), decode=str)
    with pytest.raises(ConfigError, match=r"dense.*routing_replay = false.*tiny:moe"):
        check(config, task)
