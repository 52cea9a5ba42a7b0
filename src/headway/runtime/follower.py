"""A learner's rank other than the first: `python -m headway.runtime.follower`, one thread.

Consumes: the calls that rank 0 makes, one message each. Produces: the same calls on its own part, which meet rank 0's
in collective operations; nothing is answered. Waits for: a message, at most 0.1 s; within a call, for the other ranks,
at most `learner.rank_timeout_s`. Shutdown: STOP or the death of the parent.
"""

import os
import sys
from pathlib import Path

import msgspec

from headway.config import parse_config
from headway.errors import HeadwayError
from headway.processes.router import (
    Router,
    announce,
    bound_router,
    end_with_parent,
    token_from_environment,
    warn_as,
)
from headway.runtime.devices import pick_device
from headway.runtime.group import (
    LOST_A_PEER,
    REFUSED,
    Accumulate,
    Command,
    FollowerSettings,
    Load,
    Save,
    Step,
    find_meeting,
    join,
    lost_a_peer,
)
from headway.runtime.learners import load_learner
from headway.training.learner import TorchLearner

MAX_BATCH_BYTES = 16 << 30
IDLE_MS = 100


def obey(learner: TorchLearner, command: Command) -> None:
    """Make the call that rank 0 makes."""
    match command:
        case Accumulate(batch):
            learner.accumulate(batch)
        case Step():
            learner.step()
        case Save(directory):
            learner.save(Path(directory))
        case Load(directory):
            learner.load(Path(directory))


def main() -> None:
    """Listen, say where, join the group, load this rank's part, and follow."""
    end_with_parent()
    settings = msgspec.json.decode(os.environ["HEADWAY_RANK"], type=FollowerSettings)
    config = parse_config(settings.config)
    warn = warn_as(f"learner rank {settings.rank}")
    token, stopped = token_from_environment(), False

    def stop() -> None:
        nonlocal stopped
        stopped = True

    with bound_router(max_bytes=MAX_BATCH_BYTES) as socket:
        router = Router(socket, token=token, kind=Command, refusal="wrong token", warn=warn)
        announce(socket, stop)
        try:
            store, host = find_meeting(settings.meeting)
            join(
                store,
                host=host,
                rank=settings.rank,
                num_ranks=config.learner.num_ranks,
                device=pick_device(config.learner.device),
                timeout_s=config.learner.rank_timeout_s,
            )
            learner = load_learner(config, settings.source, sharded=True)
            while not stopped:
                if router.poll(IDLE_MS):
                    for _, command in router.messages():
                        obey(learner, command)
        except HeadwayError as error:
            warn(" ".join(str(error).split()))  # one line, which rank 0 takes for its own last word
            leave(REFUSED)
        except RuntimeError as error:
            if not lost_a_peer(error):
                raise
            warn(f"lost another rank: {error}")
            leave(LOST_A_PEER)


def leave(code: int) -> None:
    """At once: the end of the group would wait for the others."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
