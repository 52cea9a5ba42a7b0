"""Work outside a run: one checkpoint or model, with engines of its own for as long as it takes."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.config import ConfigError, RunConfig, load_config
from headway.engine.in_process import InProcessEngine
from headway.engine.torch_engine import TorchEngine
from headway.models.loading import load_causal_lm, named_weights, save_causal_lm
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.evaluation import Evaluation, failures_line
from headway.runtime.failures import first_error
from headway.runtime.launch import check_engine
from headway.runtime.local import EnginePool
from headway.runtime.run_folder import RunFolder, RunFolderError
from headway.runtime.signal import Signal
from headway.runtime.task import open_task
from headway.runtime.waits import Waits
from headway.runtime.wiring import build_engines, build_evaluator
from headway.training.learner import TorchLearner
from headway.types import Split, WeightRef
from headway.weights import MemoryChannel

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What the user named: settings whose `model.path` is the checkpoint or model itself, and its version.

    Example: `Target(config=…, policy_version=40)`
    """

    config: RunConfig
    policy_version: int


def open_target(
    target: str, *, config_path: Path | None, overrides: Sequence[str], fixed: Mapping[str, Any] | None = None
) -> Target:
    """A run's newest checkpoint under the run's settings, or a model under those of `config_path`; then `overrides`.

    `fixed` are settings the command itself decides, dotted key to value; `model.path` and `task.latency_s` (no tool
    sleeps offline) always are. Raises ConfigError, RunFolderError.
    """
    source, version = target, 0
    if RunFolder(Path(target)).config_path.is_file():
        folder, _ = RunFolder.open(Path(target))
        version, checkpoint = verified_checkpoint(folder)
        source = str(checkpoint)
        if config_path is not None:
            raise ConfigError(
                f"{target} is a run and has settings of its own: leave out --config and change single settings with "
                f"--set, or name the checkpoint itself, {source}"
            )
        config_path = folder.config_path
    fixed = {"model.path": source, "task.latency_s": 0.0, **(fixed or {})}
    for override in overrides:
        key = ".".join(part.strip() for part in override.partition("=")[0].split("."))
        if key in fixed:
            raise ConfigError(f"--set {override}: this command takes {key} = {fixed[key]!r} itself; leave it out")
    config = with_settings(load_config(config_path, overrides), fixed)
    check_engine(config)
    return Target(config, version)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The config with some settings replaced; keys are `section.name`."""
    for key, value in settings.items():
        section, name = key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def verified_checkpoint(folder: RunFolder, *, at_most: int | None = None) -> tuple[int, Path]:
    """The newest whole and undamaged checkpoint, of a version up to `at_most`. Raises RunFolderError.

    A run under way may prune the one just chosen; then the list is read again, once.
    """
    version = _newest(folder, at_most)
    try:
        return version, folder.verify_checkpoint(version)
    except RunFolderError:
        if version in folder.checkpoint_versions():
            raise
    version = _newest(folder, at_most)
    return version, folder.verify_checkpoint(version)


def _newest(folder: RunFolder, at_most: int | None) -> int:
    versions = [v for v in folder.checkpoint_versions() if at_most is None or v <= at_most]
    if not versions:
        limit = "yet" if at_most is None else f"at or before version {at_most}"
        raise RunFolderError(f"{folder.checkpoints} has no checkpoint {limit}")
    return versions[-1]


def evaluate_target(
    target: str, *, split: Split, size: int, config_path: Path | None, overrides: Sequence[str], say: Say
) -> Evaluation:
    """Greedy accuracy of a run's newest checkpoint, or of a model directory or hub id on the task of a config.

    Raises ConfigError, RunFolderError, EngineLost.
    """
    chosen = open_target(target, config_path=config_path, overrides=overrides)
    config = chosen.config
    task = open_task(config, say=say)
    model = load_causal_lm(task.model)

    async def work(engines: EnginePool) -> Evaluation:
        return await build_evaluator(config, task, engines)(split, size, chosen.policy_version)

    found = with_engines(work, config, model, task.tokenizer, chosen.policy_version, say=say)
    if found.num_failed:
        say(f"{failures_line(found.num_failed, found.num_prompts, found.last_failure)} (they count as 0)")
    return found


def with_engines(
    work: Callable[[EnginePool], Awaitable[T]],
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    policy_version: int,
    *,
    say: Say,
) -> T:
    """Engines on a model's weights for as long as `work` takes.

    Raises the first error of work, engines and supervision, such as EngineLost.
    """
    with tempfile.TemporaryDirectory(prefix="headway-offline-") as scratch, closing(MemoryChannel()) as channel:
        if config.engine == "torch":
            model.config.save_pretrained(scratch)
        else:
            save_causal_lm(model, tokenizer, Path(scratch))  # a server starts from the weights
        say(f"starting {config.engines.num_engines} {config.engine} engine(s)")
        engines = build_engines(config, Path(scratch), Path(scratch), signal=Signal(), say=say)
        ref = channel.publish(policy_version, named_weights(model))
        waits = Waits(limit_s=config.wait_limit_s, say=say)
        return asyncio.run(supervised(engines, ref, partial(work, engines), waits=waits))


async def supervised(engines: EnginePool, ref: WeightRef, work: Callable[[], Awaitable[T]], *, waits: Waits) -> T:
    """Start the engines, do the work while dead ones are replaced and long waits reported, close the engines.

    | task | consumes | produces | waits for | unblocked by |
    |---|---|---|---|---|
    | `work` | living engines | the result | its engines | `EnginePool.supervise` |
    | `EnginePool.supervise` | exit codes | restarted engines; EngineLost ends everything | the clock | the clock |
    | `Waits.watch` | waits under way | starvation reports | the clock | the clock |

    Shutdown: work ends or fails, the other two are cancelled, engines are closed.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(waits.watch())]
            with waits.wait("start", engines.describe, "engines.num_threads"):
                await engines.start(ref)
            background.append(tasks.create_task(engines.supervise()))
            with waits.wait("answers", engines.describe, "--size, engines.num_slots or engines.num_engines"):
                result = await work()
            for task in background:
                task.cancel()
        return result
    except BaseExceptionGroup as failures:
        error = first_error(failures)
        raise error from error.__cause__
    finally:
        await engines.close()


def in_process_engine(config: RunConfig, learner: TorchLearner) -> InProcessEngine:
    """The built-in engine in this process, with the learner's weights."""
    device = pick_device(config.engines.device)
    dtype = pick_dtype(config.model.dtype, device)
    engine = TorchEngine(
        learner.model.config,
        max_slots=config.engines.num_slots,
        max_length=config.engines.max_length,
        device=device,
        dtype=dtype,
    )
    engine.load(learner.weights(), learner.policy_version)
    return InProcessEngine(engine, dtype=str(dtype).removeprefix("torch."))
