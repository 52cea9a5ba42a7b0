"""Where the servers of a run live: on this machine, or on the nodes of a Ray cluster."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from headway.config import ConfigError, RunConfig
from headway.config_sections import DistillConfig, EngineConfig, LearnerConfig, TaskConfig
from headway.processes.child import LOOPBACK, Spawn, start_child
from headway.runtime.devices import pick_device
from headway.runtime.run_folder import RunFolder
from headway.runtime.task import Task


@dataclass(frozen=True, slots=True)
class Site:
    """How a server is started, and this process's address as servers reach it."""

    spawn: Spawn = start_child
    host: str = LOOPBACK


HERE = Site()


def open_site(config: RunConfig, stack: ExitStack, *, say: Callable[[str], None]) -> Site:
    """What `runtime` names; `stack` leaves it. Raises ConfigError when the cluster has no room or is not there."""
    if config.runtime == "local":
        return HERE
    from headway.runtime.ray import Cluster  # takes seconds, and ray is an extra

    cluster = Cluster(
        config.ray.address,
        bundles(config),
        strategy=config.ray.strategy,
        timeout_s=config.ray.place_timeout_s,
        check_place=partial(_check_place, config),
    )
    stack.callback(cluster.close)
    say(f"placed by Ray: {cluster.describe()}")
    return Site(cluster.spawn, cluster.host)


def bundles(config: RunConfig) -> dict[str, Mapping[str, float]]:
    """What each server of a run takes of a node, by the stem of its log file; rank 0 is the run's own process."""
    return {name: _needs(getattr(config, section)) for name, section in _placed(config).items()}


def _placed(config: RunConfig) -> dict[str, str]:
    """Servers that this run starts, with the section of the settings that speaks of their threads and device."""
    engines, distill = config.engines, config.distill
    placed = {} if engines.url else {f"engine-{i}": "engines" for i in range(engines.num_engines)}
    placed |= {f"learner-rank-{rank}": "learner" for rank in range(1, config.learner.num_ranks)}
    if config.proximal == "exact_model":
        placed["old-logit-worker"] = "learner"
    if distill.teacher and not distill.is_remote:
        placed["teacher"] = "distill"
    placed |= {f"environment-{i}": "task" for i in range(config.task.num_workers)}
    return placed


def check_site(config: RunConfig) -> None:
    """Refuse what Ray cannot place. Raises ConfigError."""
    if config.runtime == "local":
        return
    if find_spec("ray") is None:
        raise ConfigError('runtime = "ray" needs Ray: pip install \'headway[ray]\', or set runtime = "local"')
    if config.engine != "torch" and not config.engines.url:
        raise ConfigError(
            f'runtime = "ray" places the built-in engine alone; start {config.engine} yourself and give engines.url, '
            'or set engine = "torch" or runtime = "local"'
        )
    if config.ray.address.startswith("ray://"):
        raise ConfigError(
            f"ray.address = {config.ray.address!r} is Ray's client, which runs nothing on the cluster's own network; "
            'start Headway on a node of the cluster, with ray.address = "auto"'
        )
    placed = _placed(config)
    for section in sorted(set(placed.values()) - {"task"}):
        device = getattr(config, section).device
        if device.startswith("cuda:"):
            raise ConfigError(f'{section}.device = "{device}", but Ray picks the GPU of each server; set it to "cuda"')
    if not placed:
        raise ConfigError(
            'runtime = "ray" has nothing to place: the engine is joined by engines.url, and there is no other server; '
            'set runtime = "local"'
        )


def models_for_all(config: RunConfig, task: Task, folder: RunFolder) -> Task:
    """The task with models that every node finds: under Ray, copies of local ones in the run folder."""
    if config.runtime == "local":
        return task
    model = _for_all(task.model, folder, "model") if config.learner.num_ranks > 1 else task.model
    return replace(task, model=model, teacher=_for_all(task.teacher, folder, "teacher"))


def _for_all(source: str, folder: RunFolder, name: str) -> str:
    """A copy of a model's folder, made once; a hub id or a URL as it is."""
    if not source or not Path(source).is_dir():
        return source
    copy = folder.path / "models" / name
    if not copy.is_dir():
        draft = copy.with_name(f"{name}.partial")
        shutil.copytree(source, draft, dirs_exist_ok=True)
        draft.rename(copy)
    return str(copy)


def _check_place(config: RunConfig, name: str, node: str, is_here: bool) -> None:
    """Refuse a node that a server could not work on. Raises ConfigError."""
    if config.weights == "memory" and name.startswith("engine") and not is_here:
        raise ConfigError(
            f'weights = "memory" is shared memory of one machine, but Ray placed {name} on node {node}; set weights to '
            '"collective", or, on a shared file system, "disk" or "delta"; or ray.strategy to "STRICT_PACK"'
        )


def _needs(section: EngineConfig | LearnerConfig | DistillConfig | TaskConfig) -> Mapping[str, float]:
    if isinstance(section, TaskConfig):
        return {"CPU": 1}
    return {"CPU": section.num_threads} | ({"GPU": 1} if pick_device(section.device).startswith("cuda") else {})
