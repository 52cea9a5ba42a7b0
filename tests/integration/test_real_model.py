"""SmolLM2-135M-Instruct on real questions: minutes on a CPU. `make test-slow` builds model and data once."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from runs import headway, ledger, records

from headway.envs.gsm8k import Gsm8k
from headway.models.loading import load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = [
    "--set=batch_size=8",
    "--set=group_size=4",
    "--set=num_steps=3",
    "--set=max_staleness=1",
    "--set=sampling.max_response_tokens=48",
    "--set=engines.num_slots=16",
    "--set=evaluation.every=0",
    "--set=evaluation.test_size=0",
    "--set=learner.micro_batch_tokens=2048",
]

HALF = [
    "--set=num_steps=24",
    "--set=batch_size=8",
    "--set=group_size=4",
    "--set=sampling.max_response_tokens=32",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by("get_smollm2.py", tmp_path_factory.mktemp("model") / "smollm2")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by("get_gsm8k.py", tmp_path_factory.mktemp("data") / "gsm8k.jsonl")


def made_by(script: str, target: Path) -> Path:
    result = subprocess.run([sys.executable, ROOT / "scripts" / script, target], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def trained(run: Path, config: str, smollm2: Path, *sets: str) -> list[dict]:
    result = headway("train", ROOT / "configs" / config, f"--run={run}", f"--set=model.path={smollm2}", *SMALL, *sets)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ledger(run)["samples"]["trained"] == 3 * 8
    return records(run, "step")


def test_smollm2_trains_asynchronously_on_word_problems(smollm2: Path, questions: Path, tmp_path: Path):
    steps = trained(tmp_path / "run", "gsm8k-smollm2.toml", smollm2, f"--set=task.options.path={questions}")
    # Engine and learner compute the same model two ways; at equal version they agree closely.
    assert steps[0]["mean_abs_delta"] < 1e-3
    assert steps[0]["staleness_token_max"] == 0


def test_a_calculator_is_used_over_turns_token_in_token_out(smollm2: Path, questions: Path, tmp_path: Path):
    steps = trained(
        tmp_path / "run",
        "calculator-smollm2.toml",
        smollm2,
        f"--set=task.options.path={questions}",
        "--set=sampling.max_turns=3",
        "--set=sampling.max_response_tokens=96",
    )
    assert steps[0]["mean_abs_delta"] < 1e-3


def test_a_reasoning_gym_task_runs_by_name(smollm2: Path, tmp_path: Path):
    trained(tmp_path / "run", "chain-sum.toml", smollm2)


def test_half_of_a_model_nears_the_whole(
    smollm2: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    scores = importlib.import_module("distillation_scores")
    half, run = tmp_path / "half", tmp_path / "run"
    script = ROOT / "scripts" / "halve_model.py"
    subprocess.run([sys.executable, script, smollm2, half], check=True, capture_output=True)
    result = headway(
        "train",
        ROOT / "configs" / "distill-smollm2.toml",
        f"--run={run}",
        f"--set=model.path={half}",
        f"--set=distill.teacher={smollm2}",
        f"--set=task.options.path={questions}",
        *HALF,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    ledger(run)
    environment = Gsm8k(load_tokenizer(smollm2), path=questions)

    def kl(student: Path) -> float:
        models = load_causal_lm(student), load_causal_lm(smollm2)
        return scores.exact_kl(*models, environment, num_prompts=16, max_tokens=32)[0]

    before, after = kl(half), kl(run / "checkpoints" / "version-000024")
    assert after < 0.8 * before, (before, after)
