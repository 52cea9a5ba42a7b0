"""The train–inference noise floor of one model on this machine, measured with a real engine process."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from headway.algorithms import NoiseFloor, noise_floor
from headway.config import RunConfig, load_config
from headway.errors import HeadwayError
from headway.runtime.checks import check, check_algorithm
from headway.runtime.evaluation import ask
from headway.runtime.local import EnginePool
from headway.runtime.run_folder import RunFolder, RunFolderError
from headway.runtime.signal import Signal
from headway.runtime.task import Task, open_task
from headway.runtime.wiring import build_engines, episode_settings, load_learner, pick_device, pick_dtype
from headway.types import Batch, Group, WeightRef
from headway.weights import MemoryChannel


class NothingSampled(HeadwayError, RuntimeError):
    """Every episode failed, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class EngineNoise:
    """The floor, and what it was measured on.

    Example: `EngineNoise(model="runs/a", task="addition", engine="torch", engine_dtype="float32", …)`
    """

    model: str
    task: str
    engine: str
    engine_dtype: str
    learner_dtype: str
    policy_version: int
    temperature: float
    kept_mass: float
    """Mean probability that top-p/top-k left; below 1 the learner, which sees all of it, differs by that much too."""
    num_responses: int
    floor: NoiseFloor


def measure_noise(
    target: str, *, size: int, config_path: Path | None, overrides: Sequence[str], say: Callable[[str], None]
) -> EngineNoise:
    """Sample `size` responses with a run's newest checkpoint or a model, and score the same tokens as the learner does.

    Engine and learner hold the same parameters (staleness 0). Raises NothingSampled, ConfigError, RunFolderError.
    """
    config = _config(target, config_path, overrides)
    check_algorithm(config)
    task = open_task(config, say=say)
    check(config, task)
    learner = load_learner(config, task.model, tokenizer=task.tokenizer)
    with tempfile.TemporaryDirectory(prefix="headway-doctor-") as scratch, closing(MemoryChannel()) as channel:
        AutoConfig.from_pretrained(task.model).save_pretrained(scratch)
        engines = build_engines(config, Path(scratch), Path(scratch), signal=Signal(), say=say)
        ref = channel.publish(learner.policy_version, learner.weights())
        groups = asyncio.run(_sample(config, task, engines, ref, size))
    if not groups:
        raise NothingSampled(
            f"all {size} episodes of task {config.task.name!r} failed; `headway eval` has the same task"
        )
    rows, logprobs, _ = learner.score(Batch(ref.version, ref.version, tuple(groups)))
    assert rows.behavior_logprobs is not None and rows.behavior_entropy is not None
    responses = [group.responses[0] for group in groups]
    kept = [r.side.kept_mass[r.mask] for r in responses if r.side.kept_mass is not None]
    origin = responses[0].origin
    assert origin is not None
    dtype = pick_dtype(config.model.dtype, pick_device(config.learner.device))
    return EngineNoise(
        model=target,
        task=config.task.name,
        engine=config.engine,
        engine_dtype=origin.dtype,
        learner_dtype=str(dtype).removeprefix("torch."),
        policy_version=ref.version,
        temperature=config.sampling.temperature,
        kept_mass=float(np.concatenate(kept).mean()) if kept else 1.0,
        num_responses=len(responses),
        floor=noise_floor(logprobs, rows.behavior_logprobs, rows.behavior_entropy, rows.mask),
    )


def _config(target: str, config_path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The settings of the run, or of `config_path` with the model in place of its own; one engine, no slow tools."""
    folder, source = RunFolder(Path(target)), target
    if folder.config_path.is_file():
        versions = folder.checkpoint_versions()
        if not versions:
            raise RunFolderError(f"{target} has no checkpoint yet")
        config_path, source = folder.config_path, str(folder.checkpoint(versions[-1]))
    fixed = (f"model.path={json.dumps(source)}", "task.latency_s=0", "engines.num_engines=1", "engines.logprobs=true")
    return load_config(config_path, [*overrides, *fixed])


async def _sample(config: RunConfig, task: Task, engines: EnginePool, ref: WeightRef, size: int) -> list[Group]:
    settings = episode_settings(config, task)
    try:
        await engines.start(ref)
        return await ask(
            "train",
            size,
            environment=task.environment,
            engines=engines,
            sampling=settings.sampling,
            settings=settings,
            decode=task.decode,
        )
    finally:
        await engines.close()
