"""Engines outside a run: supervised as in one, and what names a target is checked before anything starts."""

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scripted import completion

from headway.config import ConfigError, load_config
from headway.protocols import EngineDied
from headway.runtime.compare import teacher_notice
from headway.runtime.local import EngineLost, EnginePool
from headway.runtime.offline import open_target, supervised, verified_checkpoint
from headway.runtime.run_folder import RunFolder, RunFolderError
from headway.runtime.signal import Signal
from headway.runtime.waits import Waits
from headway.types import Sampling, WeightRef


class Process:
    """An engine's process and client in one; `dies_at` names the call in whose middle it exits."""

    def __init__(self, dies_at: str | None) -> None:
        self.client = self
        self.num_pending, self.last_status = 0, None
        self._dies_at, self._code = dies_at, None
        self._error: Exception | None = None

    def poll(self) -> int | None:
        return self._code

    async def _answer(self, call: str) -> None:
        if call == self._dies_at:
            self._code = -9
            while self._error is None:
                await asyncio.sleep(0.01)
            raise self._error

    async def update_weights(self, ref: WeightRef) -> None:
        await self._answer("update")

    async def status(self) -> None: ...

    async def generate(self, token_ids: object, sampling: Sampling) -> object:
        await self._answer("generate")
        return completion([1], [0])

    def give_back(self, error: Exception) -> None: ...

    def fail_all(self, error: Exception) -> None:
        self._error = error

    def log_tail(self) -> str:
        return "CUDA out of memory"

    def close(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...


def pool(*dies_at: str | None, max_restarts: int = 0) -> EnginePool:
    """One seat; each process that is started in it dies where the next entry says, the last one's for ever."""
    fates = itertools.chain(dies_at, itertools.repeat(dies_at[-1]))
    return EnginePool(
        lambda name, log_path: Process(next(fates)),  # pyright: ignore[reportArgumentType]
        num_engines=1,
        logs=Path(),
        signal=Signal(),
        num_slots=64,
        max_restarts=max_restarts,
        patience_s=5,
        stall_s=60,
        say=lambda message: None,
    )


def generated(engines: EnginePool, waits: Waits | None = None) -> object:
    async def work() -> object:
        pick = engines.affine()
        while True:
            try:
                return await (await pick()).generate(np.array([1], np.int32), Sampling(max_tokens=1))
            except EngineDied:
                await asyncio.sleep(0)

    async def main() -> object:
        ref = WeightRef(version=0, path="", checksum="")
        limit = Waits(limit_s=60, say=lambda message: None)
        async with asyncio.timeout(10):
            return await supervised(engines, ref, work, waits=waits or limit)

    return asyncio.run(main())


def test_an_engine_that_dies_in_the_middle_is_replaced_and_its_work_asked_for_again():
    assert generated(pool("generate", None, max_restarts=1)) is not None


def test_an_engine_that_keeps_dying_ends_the_work_with_its_log():
    with pytest.raises(EngineLost, match="CUDA out of memory"):
        generated(pool("generate", max_restarts=1))


def test_an_engine_that_dies_before_it_has_weights_is_lost_at_once():
    with pytest.raises(EngineLost, match=r"before it had its first weights[\s\S]*CUDA out of memory"):
        generated(pool("update"))


def test_a_long_wait_is_reported(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    engines = pool(None)

    async def slow(*_: object) -> object:
        await asyncio.sleep(0.3)
        return completion([1], [0])

    monkeypatch.setattr(Process, "generate", slow)
    generated(engines, Waits(limit_s=0.05, say=said.append))
    # On a busy machine the start may have been long as well.
    assert any("starvation: answers has waited" in line and "engine-0 at version 0" in line for line in said)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that was never started but has two checkpoints."""
    folder = RunFolder.create(tmp_path / "run", load_config(None, ["task.latency_s=2", "engines.logprobs=false"]))

    def save(directory: Path) -> None:
        (directory / "weights").write_text("w")

    for version in (0, 4):
        folder.save_checkpoint(version, save)
    return folder


def test_a_run_is_opened_at_its_newest_checkpoint_with_its_settings_and_those_given(run: RunFolder):
    target = open_target(
        str(run.path), config_path=None, overrides=["sampling.top_k=7"], fixed={"engines.logprobs": True}
    )
    assert target.policy_version == 4 and target.config.model.path == str(run.checkpoint(4))
    assert (target.config.sampling.top_k, target.config.task.latency_s, target.config.engines.logprobs) == (7, 0, True)


@pytest.mark.parametrize("override", ["model.path=x", "model . path = x", "engines.logprobs=false", "task.latency_s=1"])
def test_a_setting_that_the_command_decides_itself_is_refused_and_not_ignored(run: RunFolder, override: str):
    with pytest.raises(ConfigError, match="leave it out"):
        open_target(str(run.path), config_path=None, overrides=[override], fixed={"engines.logprobs": True})


def test_another_config_for_a_run_is_refused_with_the_mend(run: RunFolder, tmp_path: Path):
    other = tmp_path / "other.toml"
    other.write_text("seed = 3")
    with pytest.raises(ConfigError, match=r"leave out --config .*name the checkpoint itself, .*version-000004"):
        open_target(str(run.path), config_path=other, overrides=[])
    target = open_target(str(run.checkpoint(4)), config_path=other, overrides=[])
    assert target.config.seed == 3 and target.config.model.path == str(run.checkpoint(4))


def test_a_damaged_checkpoint_is_refused(run: RunFolder):
    (run.checkpoint(4) / "weights").write_text("W")
    with pytest.raises(RunFolderError, match=r"version-000004 is damaged \(weights\)"):
        open_target(str(run.path), config_path=None, overrides=[])


def test_a_checkpoint_that_is_pruned_while_it_is_read_gives_way_to_the_one_before(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    listed = iter([[0, 4], [0], [0]])
    monkeypatch.setattr(RunFolder, "checkpoint_versions", lambda self: next(listed))
    run.checkpoint(4).rename(run.checkpoints / "partial-version-000004")
    assert verified_checkpoint(run) == (0, run.checkpoint(0))


def test_no_checkpoint_up_to_a_version_is_said(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", load_config(None))
    with pytest.raises(RunFolderError, match="has no checkpoint at or before version 3"):
        verified_checkpoint(folder, at_most=3)


def test_episodes_that_fail_are_counted_with_the_reason():
    from scripted import ScriptedEngine, TextEnvironment

    from headway.runtime.evaluation import evaluate
    from headway.runtime.rollouts import EpisodeSettings

    def broken(text: str) -> object:
        raise OSError("the tool is down")

    async def pick() -> ScriptedEngine:
        return ScriptedEngine([completion([5, 0], [0, 0])])

    sampling = Sampling(max_tokens=4)
    found = asyncio.run(
        evaluate(
            "test",
            1,
            0,
            environment=TextEnvironment(broken),  # pyright: ignore[reportArgumentType]
            engines=SimpleNamespace(affine=lambda oldest: pick),  # pyright: ignore[reportArgumentType]
            settings=EpisodeSettings(sampling, 1, 0, 4, 1, 1, 5.0),
            decode=str,
        )
    )
    assert (found.num_failed, found.accuracy) == (1, 0)
    assert found.last_failure is not None and "the tool is down" in found.last_failure


@pytest.mark.parametrize(("weight", "beside"), [(0.0, "alone"), (0.5, "beside the rewards")])
def test_a_comparison_of_a_distillation_says_what_it_leaves_out(weight: float, beside: str):
    assert not teacher_notice(load_config(None))
    settings = ["distill.teacher=tiny:3m", f"distill.reward_weight={weight}"]
    assert beside in (said := teacher_notice(load_config(None, settings))) and "not compared" in said
