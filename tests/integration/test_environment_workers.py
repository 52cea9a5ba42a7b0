"""Environments in processes of their own: the same answers, and no judge that blocks, raises or dies holds a run up."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from runs import Running, ledger, records, train_arguments, wait_for

from headway.envs import Turn, make_environment
from headway.envs.messages import WorkerSettings
from headway.envs.remote import RemoteEnvironment, StepFailed, WorkerDied, start_workers
from headway.models.loading import load_tokenizer

HERE = Path(__file__).parent

STALL_S = 1.0


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the task as a user's own would be found."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def environment(model: Path, tmp_path: Path, said: list[str]) -> Iterator[RemoteEnvironment]:
    local = make_environment("worker_task:Judged", tokenizer=load_tokenizer(model))
    settings = WorkerSettings(name="worker_task:Judged", options={}, tokenizer=str(model), episode_timeout_s=30)
    with closing(start_workers(local, settings, tmp_path, num_workers=2, stall_s=STALL_S, say=said.append)) as found:
        yield found


async def play(environment: RemoteEnvironment, *texts: str) -> list[Turn]:
    episode = environment.start(environment.prompt("train", 0))
    return [await episode.step(text) for text in texts]


def processes(environment: RemoteEnvironment) -> list[psutil.Process]:
    return [psutil.Process(worker._running.server.pid) for worker in environment._workers if worker._running]


def test_answers_are_those_of_the_environment_and_workers_end_with_it(environment: RemoteEnvironment, said: list[str]):
    async def scenario() -> None:
        assert await play(environment, "go on", "yes") == [Turn(0.25, "and?"), Turn(1.0)]
        with pytest.raises(StepFailed, match=r"^ValueError: not like this$"):
            await play(environment, "raise")
        begun = time.monotonic()
        answers = await asyncio.gather(*(play(environment, "wait") for _ in range(40)))
        assert answers == [[Turn(1.0)]] * 40 and time.monotonic() - begun < 10
        assert await play(environment, "wait long") == [Turn(1.0)]
        await asyncio.sleep(0.2)
        assert not any(worker._running.dealer.num_pending for worker in environment._workers if worker._running)

    asyncio.run(scenario())
    assert not said
    running = processes(environment)
    environment.close()
    assert len(running) == 2 and not psutil.wait_procs(running, timeout=10)[1]


def test_only_the_step_at_fault_fails_where_nothing_else_is_lost(environment: RemoteEnvironment, said: list[str]):
    async def scenario() -> None:
        texts = ["wait", "wait", "block", "wait", "die", "wait"]
        outcomes = await asyncio.gather(*(play(environment, text) for text in texts), return_exceptions=True)
        for text, outcome in zip(texts, outcomes, strict=True):
            if text == "wait":
                assert outcome == [Turn(1.0)]
            else:
                assert type(outcome) is WorkerDied
        begun = time.monotonic()
        assert await asyncio.gather(*(play(environment, "yes") for _ in range(4))) == [[Turn(1.0)]] * 4
        assert time.monotonic() - begun < 10

    asyncio.run(scenario())
    assert any("died (exit 7); starting it anew" in line for line in said)
    assert any("one step held it up for 1 s" in line for line in said) and len(said) == 2


def test_an_episode_does_not_go_on_in_a_process_that_never_saw_it_begin(environment: RemoteEnvironment):
    async def scenario() -> None:
        episode = environment.start(environment.prompt("train", 0))
        assert (await episode.step("go on")).observation
        for process in processes(environment):
            process.kill()
            process.wait(10)
        with pytest.raises(StepFailed, match="started after the episode"):
            await episode.step("go on")

    asyncio.run(scenario())


def test_an_environment_that_cannot_be_built_there_is_said_at_once(model: Path, tmp_path: Path):
    local = make_environment("addition", tokenizer=load_tokenizer(model))
    settings = WorkerSettings(name="nowhere:Task", options={}, tokenizer=str(model), episode_timeout_s=30)
    with pytest.raises(RuntimeError, match=r"environment-0 exited with code 1[\s\S]*'nowhere:Task'"):
        start_workers(local, settings, tmp_path, num_workers=1, stall_s=1, say=print)


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_run_whose_judge_is_killed_adds_up(model: Path, tmp_path: Path):
    run, log = tmp_path / "run", tmp_path / "log"
    settings = {"task__num_workers": 2, "num_steps": 30, "task__latency_s": 0.05}
    running = Running.start(*train_arguments(run, model, **settings), log=log)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run, "step")) >= 3, limit_s=100, what="steps")
    judges = [
        child
        for child in psutil.Process(running.process.pid).children(recursive=True)
        if "headway.envs.server" in child.cmdline()
    ]
    assert len(judges) == 2
    judges[0].kill()
    wait_for(lambda: running.process.poll() is not None, limit_s=100, what="end")
    assert running.process.returncode == 0, log.read_text()
    audit = ledger(run)
    assert audit["samples"]["trained"] == 30 * 16
    assert not any(judge.is_running() and judge.status() != psutil.STATUS_ZOMBIE for judge in judges)
