"""An environment as a process: `python -m headway.envs.server`, one event loop, one zmq ROUTER socket.

Consumes: steps of episodes. Produces: one answer each. Waits for: a message, or what the environment waits for, each
episode at most `episode_timeout_s`. Shutdown: the run says so, or its death. A step that blocks or
crashes concerns this process alone.
"""

import asyncio
import os
import time

import msgspec
import zmq

from headway.envs import make_environment
from headway.envs.messages import Asked, Begun, Judged, Ping, Step, WorkerSettings
from headway.models.loading import load_tokenizer
from headway.processes.router import (
    Router,
    announce,
    bound_router,
    end_with_parent,
    token_from_environment,
    warn_as,
)
from headway.protocols import Environment, Episode

_TICK_S = 0.1

Key = tuple[bytes, int]
"""Client and episode."""


class Worker:
    """Plays the environment's side of episodes."""

    def __init__(
        self, environment: Environment, router: Router, socket: "zmq.Socket[bytes]", *, episode_timeout_s: float
    ) -> None:
        self._environment, self._router, self._socket = environment, router, socket
        self._timeout_s = episode_timeout_s
        self._episodes: dict[Key, tuple[Episode, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._receive)
        while not self._stopping:
            self._receive()
            self._forget_abandoned()
            await asyncio.sleep(_TICK_S)
        loop.remove_reader(self._socket.fileno())
        for task in self._tasks:
            task.cancel()

    def _receive(self) -> None:
        for client, asked in self._router.messages():
            if isinstance(asked, Ping):
                self._router.send(client, Judged(asked.id))
            else:
                task = asyncio.get_running_loop().create_task(self._answer(client, asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, client: bytes, step: Step) -> None:
        key = client, step.episode
        self._router.send(client, Begun(step.id))
        try:
            async with asyncio.timeout(self._timeout_s):
                turn = await self._episode(key, step).step(step.text)
            judged = Judged(step.id, float(turn.reward), turn.observation)
        except Exception as error:  # whatever a task raises is its own matter, and the run's to count
            judged = Judged(step.id, error=f"{type(error).__name__}: {error}")
        if judged.observation is None:
            self._episodes.pop(key, None)
        self._router.send(client, judged)
        self._receive()  # the descriptor signals edges: a send may swallow the one of a message

    def _episode(self, key: Key, step: Step) -> Episode:
        if step.is_first:
            prompt = self._environment.prompt(step.split, step.index)
            self._episodes[key] = self._environment.start(prompt), time.monotonic()
        if key not in self._episodes:
            raise LookupError("this process was started after the episode")
        return self._episodes[key][0]

    def _forget_abandoned(self) -> None:
        """Nobody says so when an episode ends for want of turns, or with its client."""
        oldest = time.monotonic() - self._timeout_s
        for key in [key for key, (_, begun) in self._episodes.items() if begun < oldest]:
            del self._episodes[key]


def main() -> None:
    """Build the environment of HEADWAY_ENVIRONMENT, print `{"endpoint": …, "pid": …}` and serve."""
    end_with_parent()
    settings = msgspec.json.decode(os.environ["HEADWAY_ENVIRONMENT"], type=WorkerSettings)
    token = token_from_environment()
    environment = make_environment(settings.name, tokenizer=load_tokenizer(settings.tokenizer), **settings.options)
    with bound_router() as socket:
        refusal = Judged(error="wrong token")
        router = Router(socket, token=token, kind=Asked, refusal=refusal, warn=warn_as("environment"))
        worker = Worker(environment, router, socket, episode_timeout_s=settings.episode_timeout_s)
        announce(socket, worker.stop)
        asyncio.run(worker.run())


if __name__ == "__main__":
    main()
