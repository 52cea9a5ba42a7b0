"""Whole distillation runs: teacher and student as processes, scores in the ledger, faults that cost only time."""

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from runs import Running, headway, ledger, records, small_model, train, train_arguments, wait_for
from safetensors.torch import load_file, save_file

from headway.runtime.recording import read_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's shape with other weights, sharp enough to have opinions."""
    directory = small_model(tmp_path_factory.mktemp("teacher"))
    file = directory / "model.safetensors"
    torch.manual_seed(1)
    tensors = {name: t + 0.3 * torch.randn_like(t) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def teachers_of(running: Running) -> list[psutil.Process]:
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "headway.teacher.server" in " ".join(child.cmdline())]


def test_the_student_nears_its_teacher_and_the_run_replays(model: Path, teacher: Path, tmp_path: Path):
    run = tmp_path / "run"
    settings = {"distill__teacher": str(teacher), "distill__num_draws": 32, "optimizer__lr": 1e-2}
    settings |= {"optimizer__schedule": "constant", "batch_size": 64, "engines__num_slots": 32}
    train(run, model, record=True, num_steps=30, **settings)
    audit = ledger(run)
    assert audit["samples"]["trained"] == audit["samples_issued"] == 30 * 64
    assert max(map(int, audit["token_staleness"])) <= 2
    steps = records(run, "step")
    assert sum(s["teacher_kl"] for s in steps[-5:]) < 0.8 * sum(s["teacher_kl"] for s in steps[:5])
    assert steps[0]["cache_bytes_per_token"] == 32 * 12
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in steps[0] if f"`{name}`" not in documented] == []
    assert "bit-identical" in headway("replay", run).stdout


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_dead_teacher_and_a_killed_run_lose_nothing(model: Path, teacher: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {"distill__teacher": str(teacher), "distill__method": "forward_kl_teacher_topk", "distill__top_k": 4}
    arguments = train_arguments(run, model, num_steps=40, record=True, task__latency_s=0.05, **settings)
    running = Running.start(*arguments, log=log)
    wait_for(lambda: num_steps(run) >= 2, limit_s=120, what=f"first steps: {log.read_text()[-2000:]}")
    teachers_of(running)[0].kill()
    wait_for(lambda: num_steps(run) >= 12, limit_s=120, what=f"steps after it: {log.read_text()[-2000:]}")
    assert "the teacher died (exit -9)" in log.read_text()
    teachers = teachers_of(running)
    left = [*running.kill(), *teachers]
    wait_for(lambda: not any(map(psutil.pid_exists, (p.pid for p in left))), limit_s=15, what="end of children")
    result = headway("resume", run)
    assert result.returncode == 0, result.stdout + result.stderr
    audit = ledger(run)
    assert audit["samples"]["trained"] == audit["samples_issued"] == 40 * 16
    assert [record["step"] for record in records(run, "step")] == list(range(40))
    assert "bit-identical" in headway("replay", run).stdout


def test_reward_and_teacher_train_together(model: Path, teacher: Path, tmp_path: Path):
    run = tmp_path / "run"
    settings = {"distill__reward_weight": 0.5, "distill__method": "reverse_kl_student_topk", "distill__top_k": 4}
    settings |= {"behavior_entropy": "topk_lower_bound", "behavior_entropy_top": 20, "record": True}
    train(run, model, distill__teacher=str(teacher), num_steps=2, evaluation__every=0, **settings)
    step = records(run, "step")[-1]
    assert step["loss"] == pytest.approx(step["distill_loss"] + 0.5 * step["policy_loss"], rel=1e-4, abs=1e-6)
    assert step["cache_bytes_per_token"] == 8 * (1 + 4)
    for response in read_batch(run / "batches", 0).responses:  # 20 ids for the bound, 4 of them for the teacher
        side = response.side
        assert side.top_ids is not None and side.top_ids.shape[1] == 20
        assert side.teacher_logprobs is not None and side.teacher_logprobs.shape[1] == 1 + 4


def test_a_teacher_that_cannot_teach_is_refused_before_the_start(model: Path, teacher: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    for file in teacher.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    spec = json.loads((other / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    result = headway(*train_arguments(tmp_path / "run", model, distill__teacher=str(other)))
    assert result.returncode == 1
    assert "2 tokens differ, first '0' (id 3 for the student, 4 for the teacher)" in result.stderr


def test_a_teacher_too_short_for_the_longest_response_is_refused_before_the_start(
    model: Path, teacher: Path, tmp_path: Path
):
    short = shutil.copytree(teacher, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 6}))
    result = headway(*train_arguments(tmp_path / "run", model, distill__teacher=str(short)))
    assert result.returncode == 1
    said = " ".join(result.stderr.split())
    assert "has 6 positions, but a prompt of" in said and "sampling.max_response_tokens = 3 may need" in said


def num_steps(run: Path) -> int:
    return len(records(run, "step")) if (run / "metrics.jsonl").exists() else 0
