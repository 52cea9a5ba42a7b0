"""Real asynchronous runs of every proximal source: exact routes against an independent oracle, across kill -9."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from documented import undocumented
from runs import Running, assert_moving, headway, ledger, records, train, train_arguments, wait_for
from transformers import AutoModelForCausalLM

from headway.runtime.learners import replay_learner
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.types import Response

CROSSING = {
    "algorithm": "decoupled_masked",
    "batch_size": 4,
    "group_size": 4,
    "max_staleness": 4,
    "sampling__max_response_tokens": 40,
    "engines__num_slots": 20,
    "engines__max_length": 64,
    "evaluation__every": 0,
    "evaluation__test_size": 0,
    "checkpoint__every": 7,
    "record": True,
}
"""One group a step and long responses: the learner moves on several times while one response grows."""


def relayed(run: Path, **more: object) -> dict[str, object]:
    """Settings under which responses cross three versions and more, whoever is faster."""
    relay = {"task__name": "relay_task:Relay", "task__options__metrics": str(run / "metrics.jsonl")}
    return CROSSING | relay | {"max_staleness": 6, "sampling__max_turns": 4, "checkpoint__every": 4} | more


@dataclass(frozen=True)
class Checked:
    """What an oracle found in a recorded run."""

    proximal: float
    """Largest |recorded proximal − log-prob under the version that sampled|."""
    behavior: float
    """Largest |recorded behavior − the same|."""
    num_versions: list[int]
    """Of each response."""


def checked(run: Path) -> Checked:
    """Retrains the recorded batches to have every version's parameters, and asks plain transformers."""
    folder, config = RunFolder.open(run)
    learner = replay_learner(folder, config)
    models, proximal, behavior, num_versions = [], 0.0, 0.0, []
    for step in recorded_steps(folder.batches):
        models.append(AutoModelForCausalLM.from_pretrained(folder.checkpoint(0)).eval())
        models[-1].load_state_dict(learner.model.state_dict())
        batch = read_batch(folder.batches, step)
        for group in batch.groups:
            for response in group.responses:
                exact, mask = exact_logprobs(models, group.prompt.token_ids, response), response.mask
                assert response.proximal_logprobs is not None and response.behavior_logprobs is not None
                proximal = max(proximal, float(np.abs(response.proximal_logprobs - exact).max()))
                behavior = max(behavior, float(np.abs(response.behavior_logprobs - exact)[mask].max(initial=0)))
                num_versions.append(len(np.unique(response.versions[mask])))
        learner.train(batch)
    return Checked(proximal, behavior, num_versions)


def farthest_from_average(run: Path, beta: float) -> float:
    """Largest |recorded proximal − log-prob under Σ β^(k−i) θ_i / Σ β^(k−i)| over versions i ≤ k since the last reset.

    Averages anew from all retrained parameters at every step, and asks plain transformers.
    """
    folder, config = RunFolder.open(run)
    learner = replay_learner(folder, config)
    model = AutoModelForCausalLM.from_pretrained(folder.checkpoint(0)).eval()
    resets = [record["proximal_reset"] for record in records(run, "step")]
    thetas: list[dict[str, torch.Tensor]] = []
    worst = 0.0
    for step in recorded_steps(folder.batches):
        theta = {name: tensor.double() for name, tensor in learner.model.state_dict().items()}
        thetas = [theta] if step and resets[step - 1] else [*thetas, theta]
        powers = [beta**age for age in reversed(range(len(thetas)))]
        shares = [power / sum(powers) for power in powers]
        average = {name: sum(w * t[name] for w, t in zip(shares, thetas, strict=True)) for name in theta}
        model.load_state_dict(average)
        batch = read_batch(folder.batches, step)
        for group in batch.groups:
            for response in group.responses:
                found = exact_logprobs([model] * (step + 1), group.prompt.token_ids, response)
                assert response.proximal_logprobs is not None
                worst = max(worst, float(np.abs(response.proximal_logprobs - found).max()))
        learner.train(batch)
    return worst


@torch.no_grad()
def exact_logprobs(models: list, prompt: np.ndarray, response: Response) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, response.token_ids])).long()
    found = np.zeros(len(response.token_ids), np.float32)
    for version in np.unique(response.versions[response.mask]):
        every = torch.log_softmax(models[version](ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        chosen = every.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        found = np.where(response.versions == version, chosen, found)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", ["exact_snapshot", "exact_interrupt", "exact_model"])
def test_exact_routes_agree_with_every_versions_own_parameters_across_a_kill(source: str, model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    running = Running.start(*train_arguments(run, model, **relayed(run, proximal=source, num_steps=18)), log=log)
    wait_for(lambda: num_steps(run) >= 9, limit_s=100, what=f"step 9: {log.read_text()[-2000:]}")
    left = running.kill()
    wait_for(lambda: not any(psutil.pid_exists(p.pid) for p in left), limit_s=30, what="end of engines")
    resumed = headway("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert ledger(run)["samples"]["trained"] == 18 * 4
    assert [record["step"] for record in records(run, "step")] == list(range(18))
    assert_moving(run)
    replayed = headway("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    found = checked(run)
    assert found.proximal < 2e-5
    assert sum(num >= 3 for num in found.num_versions) >= 4, found.num_versions
    if source == "exact_interrupt":  # whose engines keep nothing of earlier versions: they serve what was published
        assert found.behavior < 2e-5


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("source", "algorithm"),
    [
        ("ewma", "decoupled_ppo"),
        pytest.param("ewma", "ppo_ewma", marks=pytest.mark.slow),
        pytest.param("ewma", "tis", marks=pytest.mark.slow),
        pytest.param("loglinear", "icepop", marks=pytest.mark.slow),
        pytest.param("behavior", "mis", marks=pytest.mark.slow),
        pytest.param("exact_snapshot", "decoupled_ppo", marks=pytest.mark.slow),
    ],
)
def test_a_recorded_run_of_any_source_replays_without_it_across_a_kill(
    source: str, algorithm: str, model: Path, tmp_path: Path
):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {**CROSSING, "algorithm": algorithm, "proximal": source, "num_steps": 24, "task__latency_s": 0.02}
    running = Running.start(*train_arguments(run, model, **settings), log=log)
    wait_for(lambda: num_steps(run) >= 10, limit_s=300, what=f"step 10: {log.read_text()[-2000:]}")
    running.kill()
    resumed = headway("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    replayed = headway("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    if source == "ewma":
        assert farthest_from_average(run, beta=0.889 if algorithm == "ppo_ewma" else 4 / (4 + 2)) < 2e-5


def test_an_exact_lag_holds_where_every_boundary_interrupts_generation(model: Path, tmp_path: Path):
    run = tmp_path / "run"
    train(run, model, **CROSSING | {"max_staleness": 2, "num_steps": 8}, proximal="exact_interrupt", exact_lag=True)
    assert [list(record["token_staleness"]) for record in records(run, "step")] == [["0"], ["1"], *[["2"]] * 6]
    assert undocumented(run) == set()
    assert checked(run).proximal < 2e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_worker_is_replaced_and_asked_again(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {**CROSSING, "proximal": "exact_model", "num_steps": 40, "task__latency_s": 0.02}
    running = Running.start(*train_arguments(run, model, **settings), log=log)
    wait_for(lambda: num_steps(run) >= 5, limit_s=300, what=f"step 5: {log.read_text()[-2000:]}")
    children = psutil.Process(running.process.pid).children(recursive=True)
    (worker,) = [child for child in children if "headway.proximal.server" in " ".join(child.cmdline())]
    worker.kill()
    wait_for(lambda: running.process.poll() is not None, limit_s=300, what=f"end: {log.read_text()[-2000:]}")
    assert running.process.returncode == 0, log.read_text()
    assert "old-logit worker died" in " ".join(log.read_text().split())
    assert checked(run).proximal < 2e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "source"),
    [
        ("mask", "exact_snapshot"),
        ("drop", "exact_interrupt"),
        pytest.param("mask", "exact_model", marks=pytest.mark.runs),
        pytest.param("drop", "exact_snapshot", marks=pytest.mark.runs),
        pytest.param("mask", "exact_interrupt", marks=pytest.mark.runs),
        pytest.param("drop", "exact_model", marks=pytest.mark.runs),
    ],
)
def test_masked_tokens_need_no_score_and_dropped_groups_leave_none_behind(
    policy: str, source: str, model: Path, tmp_path: Path
):
    run = tmp_path / "run"
    train(run, model, **relayed(run, proximal=source, over_bound=policy, max_staleness=1, num_steps=12))
    audit = ledger(run)
    assert (audit["samples"]["dropped"] if policy == "drop" else audit["tokens"]["masked"]) > 0
    assert checked(run).proximal < 2e-5


def num_steps(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0
