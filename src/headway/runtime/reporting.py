"""What a run leaves for its report: token profiles, the timeline, and metrics in other places."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from headway.algorithms import find_algorithm
from headway.config import RunConfig
from headway.report.sinks import Sinks, require_sinks, sinks_of
from headway.runtime.run_folder import RunFolder
from headway.runtime.timeline import Timeline
from headway.training.batching import Rows
from headway.training.profiles import token_profiles


def build_profiles(config: RunConfig) -> Callable[[Rows, Tensor], Mapping[str, Any]]:
    """What the learner reports of its tokens, with the boundaries that the run's own method has."""
    if not config.report.profiles:
        return lambda rows, logprobs: {}
    estr = find_algorithm("estr")
    chosen = estr.resolve(config.algorithm_params if config.algorithm == "estr" else {})
    return partial(
        token_profiles, tau=chosen["tau"], entropy_floor=chosen["entropy_floor"], clip=estr.defaults["eps_low"]
    )


def open_timeline(config: RunConfig, folder: RunFolder) -> Timeline:
    return Timeline(folder.timeline_path if config.report.timeline else None)


def check_sinks(config: RunConfig) -> None:
    """Raises SinkMissing when a sink's package is not installed."""
    require_sinks(config.report.sinks)


def open_sinks(
    config: RunConfig, folder: RunFolder, recorded: Sequence[Mapping[str, Any]], *, say: Callable[[str], None]
) -> Sinks:
    """The sinks of a run; steps that are on record went to them before a stop, and do not go again."""
    steps = [record["step"] for record in recorded if record["kind"] == "step"]
    opened = sinks_of(
        config.report.sinks, folder.path, project=config.report.project, settings=config.model_dump(mode="json")
    )
    return Sinks(opened, first_step=max(steps, default=-1) + 1, say=say)
