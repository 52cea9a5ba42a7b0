"""Episodes and groups: from a prompt to responses whose every token is the one that was served."""

from headway.rollout.episode import EnvironmentFailed, run_episode
from headway.rollout.group import EpisodeFailed, run_group, sample_seed
from headway.rollout.order import prompt_index
from headway.rollout.transcript import BadCompletion

__all__ = [
    "BadCompletion",
    "EnvironmentFailed",
    "EpisodeFailed",
    "prompt_index",
    "run_episode",
    "run_group",
    "sample_seed",
]
