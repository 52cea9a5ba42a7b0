"""A run whose π_prox is an average of the parameters: every batch's own window, restarts, and a kill."""

from pathlib import Path

import numpy as np
import pytest
import torch
from documented import undocumented
from runs import Running, headway, records, train_arguments, wait_for
from test_proximal_runs import CROSSING, exact_logprobs, num_steps
from transformers import AutoModelForCausalLM

from headway.runtime.learners import replay_learner
from headway.runtime.recording import read_batch, recorded_steps
from headway.runtime.run_folder import RunFolder
from headway.types import Batch

RESET_BELOW = 0.95
NUM_STEPS = 24

OBSERVED = CROSSING | {
    "algorithm": "decoupled_ppo",
    "algorithm_params__eps": 0.03,
    "proximal": "ewma",
    "ewma__window": "observed",
    "ewma__reset_below": RESET_BELOW,
    "num_steps": NUM_STEPS,
    "checkpoint__every": 5,
    "task__latency_s": 0.02,
}


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_an_average_by_observed_windows_that_restarts_is_the_same_across_a_kill(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    running = Running.start(*train_arguments(run, model, **OBSERVED), log=log)
    wait_for(lambda: num_steps(run) >= 13, limit_s=300, what=f"step 13: {log.read_text()[-2000:]}")
    running.kill()
    resumed = headway("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    replayed = headway("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    steps = records(run, "step")
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    restarts = [step["step"] for step in steps if step["proximal_reset"]]
    assert any(step < 10 for step in restarts) and any(step >= 13 for step in restarts)  # before the kill and after it
    assert len(restarts) < NUM_STEPS / 2
    assert [1 - step["stopped_fraction"] < RESET_BELOW for step in steps] == [s["proximal_reset"] for s in steps]
    assert undocumented(run) == set()
    from_average, from_learner = distances(run)
    assert from_average < 2e-5
    assert from_learner > 1e-3


def distances(run: Path) -> tuple[float, float]:
    """Largest |recorded proximal − log-prob| under the average, and under the parameters that the step started from.

    Version i counts Π β_j over the updates j after it, and nothing from before the last restart. β_j = W/(W + 2), W
    twice the mean staleness of the batch that made version j. Averages anew from all retrained parameters at every
    step, in float64, and asks plain transformers.
    """
    folder, config = RunFolder.open(run)
    learner = replay_learner(folder, config)
    model = AutoModelForCausalLM.from_pretrained(folder.checkpoint(0)).eval()
    stopped = [record["stopped_fraction"] for record in records(run, "step")]
    thetas: list[dict[str, torch.Tensor]] = []
    weights: list[float] = []
    worst = np.zeros(2)
    for step in recorded_steps(folder.batches):
        batch = read_batch(folder.batches, step)
        now = {name: tensor.double() for name, tensor in learner.model.state_dict().items()}
        if step and 1 - stopped[step - 1] < RESET_BELOW:
            thetas, weights = [], []
        thetas, weights = [*thetas, now], [*weights, 1.0]
        shares = [weight / sum(weights) for weight in weights]
        average = {n: torch.stack([w * t[n] for w, t in zip(shares, thetas, strict=True)]).sum(0) for n in now}
        worst = np.maximum(worst, [farthest(model, average, batch), farthest(model, now, batch)])
        window = 2 * float(np.mean(np.concatenate([step - r.versions[r.mask] for r in batch.responses])))
        weights = [weight * window / (window + 2) for weight in weights]
        learner.train(batch)
    return float(worst[0]), float(worst[1])


def farthest(model: torch.nn.Module, parameters: dict[str, torch.Tensor], batch: Batch) -> float:
    """Largest |recorded proximal − log-prob under these parameters|."""
    model.load_state_dict(parameters)
    models, worst = [model] * (batch.policy_version + 1), 0.0
    for group in batch.groups:
        for response in group.responses:
            found = exact_logprobs(models, group.prompt.token_ids, response)
            assert response.proximal_logprobs is not None
            worst = max(worst, float(np.abs(response.proximal_logprobs - found).max()))
    return worst
