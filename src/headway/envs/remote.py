"""An environment whose episodes are judged in processes of their own, so that no grader holds the run up."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from headway.envs.messages import Begun, Ping, Said, Step, WorkerSettings
from headway.envs.turns import Turn
from headway.errors import AccessRefused
from headway.processes.child import Server, Spawn, start_child
from headway.processes.dealer import Dealer
from headway.protocols import Environment
from headway.types import Ints, Prompt, Split
from headway.wire import decode

_TICK_S = 0.5
_START_S = 300.0


class WorkerDied(ConnectionError):
    """The process that judged an episode is gone, by its fault as far as one can see, or with what the episode had."""


class WorkerLost(WorkerDied):
    """The process is gone, and another episode's step was what it was at."""


class StepFailed(RuntimeError):
    """The environment raised; the message is its own."""


@dataclass(slots=True)
class _Running:
    """One process and the line to it."""

    server: Server
    dealer: Dealer
    ping: "asyncio.Future[Any] | None" = None
    pinged_at: float = 0.0
    begun: int = -1
    """The step it has turned to last."""

    def receive(self, payload: bytes) -> None:
        try:
            said = decode(payload, Said)
        except msgspec.MsgspecError as error:
            self.dealer.fail_all(WorkerDied(f"a malformed answer: {error}"))
            return
        if isinstance(said, Begun):
            self.begun = said.id
        elif said.id < 0:
            self.dealer.fail_all(AccessRefused(f"the worker refused: {said.error}"))
        elif said.error is not None:
            self.dealer.reject(said.id, StepFailed(said.error))
        else:
            self.dealer.resolve(said.id, Turn(said.reward, said.observation))


class Worker:
    """One process of workers; who waits for an answer looks after it, and one that died is started anew.

    A process that a step holds up for `stall_s` is killed. Either end costs the episode whose step it was at, and those
    past their first step; the others are judged anew.
    """

    def __init__(
        self, settings: WorkerSettings, log_path: Path, *, stall_s: float, say: Callable[[str], None], spawn: Spawn
    ) -> None:
        self._settings, self._log_path, self._spawn = settings, log_path, spawn
        self._stall_s, self._say = stall_s, say
        self._running: _Running | None = None
        self._dead: Server | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Blocking, seconds. Raises RuntimeError."""
        self._reap()
        token = secrets.token_hex(16)
        variables = {"HEADWAY_ENVIRONMENT": msgspec.json.encode(self._settings).decode(), "HEADWAY_TOKEN": token}
        server = self._spawn(
            "headway.envs.server",
            variables,
            what=self._log_path.stem,
            log_path=self._log_path,
            start_timeout_s=_START_S,
        )
        if self._closed:
            server.stop()
            return
        dealer = Dealer(server.endpoint, token, receive=lambda payload: running.receive(payload))
        self._running = running = _Running(server, dealer)

    async def step(self, episode: int, is_first: bool, prompt: Prompt, text: str) -> Turn:
        """Raises WorkerDied, WorkerLost, StepFailed."""
        running = await self._living()
        id, answer = running.dealer.expect()
        running.dealer.send(Step(id, episode, is_first, prompt.split, prompt.index, text))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=_TICK_S)
                if not answer.done():
                    self._look_after(running)
            return answer.result()
        finally:
            running.dealer.forget(id)

    def close(self) -> None:
        self._closed = True
        self._reap()
        if self._running is not None:
            self._running.dealer.close(WorkerDied("the run is over"))
            self._running.server.stop()

    def _reap(self) -> None:
        dead, self._dead = self._dead, None
        if dead is not None:
            dead.stop()

    async def _living(self) -> _Running:
        if self._running is not None:
            self._bury_the_dead(self._running)
        while self._running is None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._restart())
            await asyncio.shield(self._starting)
        return self._running

    async def _restart(self) -> None:
        try:
            await asyncio.to_thread(self.start)
        except RuntimeError as error:
            raise WorkerDied(str(error)) from error
        finally:
            self._starting = None

    def _look_after(self, running: _Running) -> None:
        """Notice a death or a standstill; only whoever is first does something about it."""
        self._bury_the_dead(running)
        if running is not self._running:
            return
        now = time.monotonic()
        if running.ping is None or running.ping.done():
            id, running.ping = running.dealer.expect()
            running.ping.add_done_callback(lambda _: running.dealer.forget(id))
            running.pinged_at = now
            running.dealer.send(Ping(id))
        elif now - running.pinged_at > self._stall_s:
            running.server.kill()
            self._bury(running, f"one step held it up for {self._stall_s:g} s")

    def _bury_the_dead(self, running: _Running) -> None:
        if running is not self._running:
            return
        if (code := running.server.poll()) is not None:
            self._bury(running, f"exit {code}")
        elif running.dealer.is_lost:
            running.server.kill()
            self._bury(running, "its answer made no sense")

    def _bury(self, running: _Running, reason: str) -> None:
        self._running, self._dead = None, running.server
        name = self._log_path.stem
        why = f"{name} died ({reason}); the end of {self._log_path} says more"
        running.dealer.reject(running.begun, WorkerDied(why))
        running.dealer.close(WorkerLost(why))
        self._say(f"{name} died ({reason}); starting it anew")


class RemoteEpisode:
    """One attempt, all of it at one worker."""

    def __init__(self, worker: Worker, id: int, prompt: Prompt) -> None:
        self._worker, self._id, self._prompt = worker, id, prompt
        self._begun = False

    async def step(self, text: str) -> Turn:
        is_first, self._begun = not self._begun, True
        while True:
            try:
                return await self._worker.step(self._id, is_first, self._prompt, text)
            except WorkerLost:
                if not is_first:
                    raise
                # Nothing of it is lost, and it is not at fault: its own time limit bounds how often.


class RemoteEnvironment:
    """The same environment: prompts are made here, answers are judged by `workers`, one an episode, in turns."""

    def __init__(self, environment: Environment, workers: Sequence[Worker]) -> None:
        self._environment, self._workers = environment, workers
        self._ids = count()
        self.stop_token_ids = environment.stop_token_ids

    def size(self, split: Split) -> int:
        return self._environment.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._environment.prompt(split, index)

    def start(self, prompt: Prompt) -> RemoteEpisode:
        id = next(self._ids)
        return RemoteEpisode(self._workers[id % len(self._workers)], id, prompt)

    def observe(self, text: str, after_stop: bool) -> Ints:
        return self._environment.observe(text, after_stop)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def start_workers(
    environment: Environment,
    settings: WorkerSettings,
    logs: Path,
    *,
    num_workers: int,
    stall_s: float,
    say: Callable[[str], None],
    spawn: Spawn = start_child,
) -> RemoteEnvironment:
    """Start all of them and wait until they listen; blocking, seconds. Raises RuntimeError."""
    workers = [
        Worker(settings, logs / f"environment-{i}.log", stall_s=stall_s, say=say, spawn=spawn)
        for i in range(num_workers)
    ]
    remote = RemoteEnvironment(environment, workers)
    try:
        with ThreadPoolExecutor(num_workers) as threads:
            list(threads.map(Worker.start, workers))
    except BaseException:
        remote.close()
        raise
    return remote
