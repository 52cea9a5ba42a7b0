"""Where the servers of a run live: on this machine, or on the nodes of a Ray cluster."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from headway.config import ConfigError, RunConfig
from headway.processes.child import LOOPBACK, Spawn, start_child
from headway.runtime.devices import pick_device


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
    engines, learner, distill = config.engines, config.learner, config.distill
    found = {f"engine-{i}": _needs(engines.num_threads, engines.device) for i in range(engines.num_engines)}
    found |= {
        f"learner-rank-{rank}": _needs(learner.num_threads, learner.device) for rank in range(1, learner.num_ranks)
    }
    if config.proximal == "exact_model":
        found["old-logit-worker"] = _needs(learner.num_threads, learner.device)
    if distill.teacher and not distill.is_remote:
        found["teacher"] = _needs(distill.num_threads, distill.device)
    return found


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


def _check_place(config: RunConfig, name: str, node: str, is_here: bool) -> None:
    """Refuse a node that a server could not work on. Raises ConfigError."""
    if config.weights == "memory" and name.startswith("engine") and not is_here:
        raise ConfigError(
            f'weights = "memory" is shared memory of one machine, but Ray placed {name} on node {node}; set weights to '
            '"collective", or, on a shared file system, "disk" or "delta"; or ray.strategy to "STRICT_PACK"'
        )


def _needs(num_threads: int, device: str) -> Mapping[str, float]:
    return {"CPU": num_threads} | ({"GPU": 1} if pick_device(device).startswith("cuda") else {})
