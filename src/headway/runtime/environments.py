"""Where a run's environment is played: in its own process, or in workers."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from headway.config import ConfigError, RunConfig
from headway.envs import WithLatency
from headway.envs.messages import WorkerSettings
from headway.envs.remote import start_workers
from headway.runtime.run_folder import RunFolder
from headway.runtime.site import Site
from headway.runtime.task import Task


def play_elsewhere(
    config: RunConfig, task: Task, folder: RunFolder, site: Site, stack: ExitStack, *, say: Callable[[str], None]
) -> Task:
    """The task as a run plays it: judged by `task.num_workers` processes, which `stack` ends, and with its latency.

    Raises ConfigError when the environment cannot be built there.
    """
    environment, limit_s = task.environment, config.rollout.episode_timeout_s
    if config.task.num_workers:
        settings = WorkerSettings(
            name=config.task.name,
            options=config.task.options,
            tokenizer=str(folder.checkpoint(0)),
            episode_timeout_s=limit_s,
        )
        start = partial(start_workers, num_workers=config.task.num_workers, stall_s=limit_s / 2, spawn=site.spawn)
        try:
            environment = stack.enter_context(closing(start(environment, settings, folder.logs, say=say)))
        except RuntimeError as error:
            raise ConfigError(f"task.num_workers = {config.task.num_workers}: {error}") from error
    if config.task.latency_s:
        environment = WithLatency(environment, mean_s=config.task.latency_s, seed=config.seed)
    return replace(task, environment=environment)
