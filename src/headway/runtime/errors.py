"""Errors that are the user's to mend: the command line shows them as one message, without a traceback."""

from headway.config import ConfigError
from headway.ledger import LedgerError
from headway.protocols import WeightsRefused
from headway.rollout.transcript import BadCompletion
from headway.runtime.local import EngineLost
from headway.runtime.recording import BundleError
from headway.runtime.rollouts import RolloutsFailing
from headway.runtime.run_folder import RunFolderError
from headway.training.learner import NonFiniteGradient
from headway.training.optimizer_state import CheckpointError

EXPECTED = (
    ConfigError,
    RunFolderError,
    LedgerError,
    BundleError,
    CheckpointError,
    WeightsRefused,
    BadCompletion,
    EngineLost,
    RolloutsFailing,
    NonFiniteGradient,
)
