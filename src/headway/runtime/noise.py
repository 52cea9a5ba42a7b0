"""The train–inference noise floor of one model on this machine, measured with a real engine process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.algorithms import NoiseFloor, noise_floor
from headway.config import ConfigError, RunConfig
from headway.errors import HeadwayError
from headway.runtime.checks import check, check_algorithm
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.evaluation import ask, failures_line
from headway.runtime.learners import load_learner
from headway.runtime.local import EnginePool
from headway.runtime.offline import open_target, with_engines
from headway.runtime.task import Task, open_task
from headway.runtime.wiring import episode_settings
from headway.types import Batch, Group


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
    algorithm: str
    """The one of the settings; where it has a threshold, `floor.cuts` starts with it."""
    floor: NoiseFloor


def measure_noise(
    target: str, *, size: int, config_path: Path | None, overrides: Sequence[str], say: Callable[[str], None]
) -> EngineNoise:
    """Sample `size` responses with a run's newest checkpoint or a model, and score the same tokens as the learner does.

    Engine and learner hold the same parameters (staleness 0). Raises NothingSampled, ConfigError, RunFolderError.
    """
    chosen = open_target(
        target, config_path=config_path, overrides=overrides, fixed={"engines.num_engines": 1, "engines.logprobs": True}
    )
    config = chosen.config
    check_algorithm(config)
    if config.engine == "sglang":
        raise ConfigError('engine = "sglang" reports no entropy, which this measurement is about; use torch or vllm')
    task = open_task(config, say=say)
    check(config, task)
    learner = load_learner(config, task.model, tokenizer=task.tokenizer)
    version = learner.policy_version
    groups, failures = with_engines(
        lambda engines: _sample(config, task, engines, size), config, learner.model, task.tokenizer, version, say=say
    )
    if failures:
        line = failures_line(len(failures), len(groups) + len(failures), failures[-1])
        if not groups:
            raise NothingSampled(line)
        say(line)
    rows, logprobs, _ = learner.score(Batch(version, version, tuple(groups)))
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
        policy_version=version,
        temperature=config.sampling.temperature,
        kept_mass=float(np.concatenate(kept).mean()) if kept else 1.0,
        num_responses=len(responses),
        algorithm=config.algorithm,
        floor=noise_floor(
            logprobs,
            rows.behavior_logprobs,
            rows.behavior_entropy,
            rows.mask,
            algorithm=config.algorithm,
            params=config.algorithm_params,
        ),
    )


async def _sample(config: RunConfig, task: Task, engines: EnginePool, size: int) -> tuple[list[Group], list[Exception]]:
    settings = episode_settings(config, task)
    return await ask(
        "train",
        size,
        environment=task.environment,
        engines=engines,
        sampling=settings.sampling,
        settings=settings,
        decode=task.decode,
    )
