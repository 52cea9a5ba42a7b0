"""One step of every source with every method that reads π_prox: its gradient, and what its pass leaves alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_proximal_sources import (
    CONFIG,
    InProcess,
    advance,
    batch,
    copied,
    exact,
    generate,
    learner,
    prompted,
    scorer,
    snapshots,
)
from transformers import Qwen3ForCausalLM

from headway.algorithms import compute_advantages, compute_loss
from headway.algorithms.proximal import AT_LOSS_TIME
from headway.config import parse_config
from headway.protocols import ProximalSource
from headway.proximal.average_source import AverageSource
from headway.proximal.model_source import ModelSource
from headway.proximal.pool import InterruptSource, Pool
from headway.proximal.snapshots import SnapshotStore
from headway.proximal.source import NoSource
from headway.runtime.proximal import build_average
from headway.runtime.run_folder import RunFolder
from headway.training.learner import TorchLearner
from headway.types import Batch

TIGHT: dict[str, dict[str, Any]] = {
    "decoupled_masked": {"band": 1.2, "eps": 0.02},
    "decoupled_ppo": {"eps": 0.02},
    "tis": {"eps": 0.02, "cap": 1.1},
    "mis": {"eps": 0.02, "low": 0.8, "high": 1.2},
    "icepop": {"eps": 0.02, "low": 0.8, "high": 1.2},
}
"""The methods that read π_prox, with bounds that act on some tokens of these batches and not on others."""
PASSES = ("exact_snapshot", "exact_model", "exact_interrupt", "ewma")
SOURCES = (*PASSES, "loglinear", "behavior", "train_start")

METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()

LAST = batch(2, [0, 0, -1, 1, 2, 2])
"""Trained at version 2, its tokens sampled by versions 0, 1 and 2."""


@dataclass
class Trained:
    """A learner with its source of π_prox; the pool is that of `exact_interrupt`."""

    learner: TorchLearner
    source: ProximalSource
    pool: Pool


def trained(method: str, source: str, directory: Path) -> Trained:
    one = learner(method, params=TIGHT[method], proximal=AT_LOSS_TIME.get(source))
    pool = Pool()

    def worker() -> ModelSource:
        store = SnapshotStore(directory)
        client = InProcess(one, directory)
        return ModelSource(client, store, max_staleness=2, policy_version=0, parameters=one.weights)

    makers: dict[str, Callable[[], ProximalSource]] = {
        "exact_snapshot": lambda: snapshots(one, directory),
        "exact_model": worker,
        "exact_interrupt": lambda: InterruptSource(scorer(one), pool, seed_of=lambda g, m: 10 * g + m),
        "ewma": lambda: AverageSource(scorer(one), window=2.0, reset_below=0.0, parameters=one.weights),
    }
    return Trained(one, makers.get(source, NoSource)(), pool)


def gradient(one: TorchLearner, given: Batch) -> dict[str, torch.Tensor]:
    """Before it is clipped: what a first step of AdamW moves shows little but its signs."""
    one.accumulate(given)
    return {n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None}


def norm(one: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in one.values()]).norm())


def farthest(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, as a share of the second's."""
    assert one.keys() == two.keys()
    return norm({name: one[name] - two[name] for name in one}) / norm(two)


def sampled_by(parameters: list[dict[str, torch.Tensor]], given: Batch, noise: float = 0.0) -> Batch:
    """The batch as an engine would have sampled it that is off by `noise` nats."""
    rng = np.random.default_rng(7)
    found = iter(np.split(exact(parameters, given), np.cumsum([len(r.mask) for r in given.responses])[:-1]))

    def sampled(response: Any) -> Any:
        off = rng.normal(0, noise, len(response.mask)) * response.mask
        return replace(response, behavior_logprobs=(next(found) + off).astype(np.float32))

    return replace(given, groups=tuple(replace(g, responses=tuple(map(sampled, g.responses))) for g in given.groups))


@pytest.mark.parametrize("method", ["decoupled_ppo", "decoupled_masked"])
@pytest.mark.parametrize("source", SOURCES)
def test_at_gap_zero_every_source_gives_the_gradient_of_plain_ppo(source: str, method: str, tmp_path: Path):
    one = trained(method, source, tmp_path)
    fresh = sampled_by([copied(one.learner)], batch(0, [0, 0, 0, -1, 0]))
    found = gradient(one.learner, one.source.complete(fresh))
    wanted = gradient(learner("ppo"), fresh)
    assert norm(wanted) > 0.1
    assert farthest(found, wanted) < 1e-5


@pytest.mark.parametrize("method", TIGHT)
@pytest.mark.parametrize("source", SOURCES)
def test_a_stale_step_has_the_gradient_of_the_sources_own_policy(source: str, method: str, tmp_path: Path):
    """Against a plain forward pass of every response by itself, and π_prox from its definition."""
    one, taken = stale(method, source, tmp_path)
    given = sampled_by(taken, LAST, noise=0.02)
    found = gradient(one.learner, one.source.complete(given))
    wanted = {name: by_definition(method, name, taken, given) for name in {source, "train_start", "behavior"}}
    assert norm(wanted[source]) > 0.01
    assert farthest(found, wanted[source]) < 1e-4
    for other in wanted.keys() - {source}:
        assert farthest(found, wanted[other]) > 1e-2  # so that another source would have been noticed


def stale(method: str, source: str, directory: Path) -> tuple[Trained, list[dict[str, torch.Tensor]]]:
    """After two steps, with the parameters of versions 0, 1 and 2."""
    one, taken = trained(method, source, directory), []
    for step in range(2):
        taken.append(copied(one.learner))
        generate(one.pool, LAST, up_to=step)
        advance(one.learner, one.source, batch(step, [step] * 4))
    generate(one.pool, LAST, up_to=2)
    return one, [*taken, copied(one.learner)]


def by_definition(
    method: str, source: str, taken: list[dict[str, torch.Tensor]], given: Batch
) -> dict[str, torch.Tensor]:
    """The loss of plain log-probs and π_prox, and its gradient."""
    model = Qwen3ForCausalLM(CONFIG).eval()
    model.load_state_dict(taken[-1], strict=False)
    model.tie_weights()
    rows = []
    for prompt, response in prompted(given):
        ids = torch.from_numpy(np.concatenate([prompt, response.token_ids])).long()
        every = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        rows.append(every.gather(1, ids[len(prompt) :, None])[:, 0])
    logprobs = torch.stack(rows)
    behavior, mask, versions = (
        torch.from_numpy(np.stack([getattr(r, name) for r in given.responses]))
        for name in ("behavior_logprobs", "mask", "versions")
    )
    rewards = torch.tensor([r.reward for r in given.responses])
    group = torch.tensor([i for i, g in enumerate(given.groups) for _ in g.responses])
    advantages, _ = compute_advantages("grpo", rewards=rewards, group=group)
    loss, _ = compute_loss(
        method,
        logprobs=logprobs,
        behavior_logprobs=behavior,
        proximal_logprobs=proximal(source, taken, given, logprobs.detach(), behavior, versions),
        advantages=advantages[:, None].expand_as(logprobs),
        mask=mask,
        group=group,
        **TIGHT[method],
    )
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def proximal(
    source: str,
    taken: list[dict[str, torch.Tensor]],
    given: Batch,
    current: torch.Tensor,
    behavior: torch.Tensor,
    versions: torch.Tensor,
) -> torch.Tensor:
    """π_prox by its definition, `[B, T]`."""
    match source:
        case "train_start":
            return current
        case "behavior":
            return behavior
        case "loglinear":
            alpha = 1 / (given.policy_version - versions + 1)
            return alpha * behavior + (1 - alpha) * current
        case "ewma":  # β = 2/(2 + 2): versions 0, 1, 2 weigh 1/4, 1/2, 1
            average = {n: (taken[0][n] + 2 * taken[1][n] + 4 * taken[2][n]) / 7 for n in taken[0]}
            taken = [average] * 3
    return torch.from_numpy(exact(taken, given)).reshape(current.shape)


def test_the_original_average_has_a_fixed_decay_and_never_restarts(tmp_path: Path):
    config = parse_config(
        {"algorithm": "ppo_ewma", "proximal": "ewma", "ewma": {"window": "observed", "reset_below": 0.99}}
    )
    one = learner("ppo_ewma", params={"eps": 1e-4})
    source = build_average(config, RunFolder(tmp_path), one, scorer(one))
    taken, active = [copied(one)], []
    for step in range(3):
        completed = source.complete(batch(step, [0] * 2 + [step] * 2))
        one.accumulate(completed)
        told = source.after_step(completed, one.step())
        assert told["proximal_reset"] == 0
        active.append(told["proximal_active_fraction"])
        taken.append(copied(one))
    assert min(active) < 0.9
    powers = [0.889**age for age in (3, 2, 1, 0)]
    for name, tensor in source.parameters.items():
        wanted = sum(p * t[name] for p, t in zip(powers, taken, strict=True)) / sum(powers)
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("source", PASSES)
def test_a_pass_disturbs_no_bit_of_the_learner(source: str, tmp_path: Path):
    plain, watched = learner(params=TIGHT["decoupled_ppo"]), trained("decoupled_ppo", source, tmp_path / "kept")
    for step in range(3):
        given = batch(step, [max(0, step - 1)] * 2 + [step] * 2)
        generate(watched.pool, given, up_to=step)
        if step < 2:
            generate(watched.pool, batch(step + 1, [step] * 2 + [step + 1] * 2), up_to=step)
        before = random_states()
        completed = watched.source.complete(given)
        watched.learner.accumulate(completed)
        watched.source.before_step(step)
        told = watched.source.after_step(completed, watched.learner.step())
        assert told and [name for name in told if f"`{name}`" not in METRICS] == []
        assert random_states() == before
        plain.train(completed)
        for name, tensor in plain.weights().items():
            assert torch.equal(watched.learner.weights()[name], tensor)
    for name, one in (("plain", plain), ("watched", watched.learner)):
        one.save(tmp_path / name)
    assert contents(tmp_path / "watched") == contents(tmp_path / "plain")
    assert {"model.safetensors", "optimizer.safetensors", "learner.json"} <= contents(tmp_path / "plain").keys()
    assert all(p.requires_grad and p.is_leaf for p in watched.learner.model.parameters())


def random_states() -> tuple[bytes, object, bytes]:
    """Of torch, Python and NumPy."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()  # pyright: ignore


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}
