"""The faults of the chaos suite; see chaos_runs.py for what is done with them."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from chaos_http import Proxy, Teacher
from chaos_runs import Fault, Run, _fork
from fake_sglang import FakeSglang

KEY = "a key for tests"
SLOW = {"task__latency_s": 0.05, "num_steps": 30}
"""A run that lasts long enough to be struck in the middle."""

DISK = {"weights": "disk"}
MISCHIEF = {"task__name": "chaos_tasks:Mischief", "rollout__episode_timeout_s": 1.0, "wait_limit_s": 0.5}


def kill(module: str, *, times: int = 1) -> Callable[[Run], int]:
    """kill -9 of a server of the run, `times` one after the other."""

    def strike(run: Run) -> int:
        done = 0
        for _ in range(times):
            run.wait_for_steps(run.num_steps + 3)
            for child in run.children(module)[:1]:
                child.kill()
                done += 1
        return done

    return strike


def freeze(*, seconds: float, whole: bool = False) -> Callable[[Run], int]:
    """SIGSTOP of the engine (or the trainer), SIGCONT after `seconds`."""

    def strike(run: Run) -> int:
        run.wait_for_steps(3)
        victims = [psutil.Process(run.process.pid)] if whole else run.children("engine")[:1]
        with contextlib.suppress(psutil.NoSuchProcess):
            for victim in victims:
                victim.suspend()
                time.sleep(seconds)
                victim.resume()
        return len(victims)

    return strike


def slow_down(run: Run) -> int:
    """One engine computes only a tenth of the time."""
    run.wait_for_steps(2)
    victims = run.children("engine")[:1]
    with contextlib.suppress(psutil.NoSuchProcess):
        while run.is_running and run.num_steps < 28:
            for victim in victims:
                victim.suspend()
                time.sleep(0.27)
                victim.resume()
                time.sleep(0.03)
    return len(victims)


def kill_trainer(run: Run) -> int:
    run.wait_for_steps(run.num_steps + 7)
    os.kill(run.process.pid, signal.SIGKILL)
    return 1


def stop_trainer(run: Run) -> int:
    """SIGTERM: the run ends in order, with a checkpoint."""
    run.wait_for_steps(run.num_steps + 7)
    os.kill(run.process.pid, signal.SIGTERM)
    return 1


def knock(run: Run) -> int:
    """Strangers at the engines' ports: wrong tokens, wrong frames, noise, and a message over the limit."""
    run.wait_for_steps(2)
    num = 0
    for engine in run.children("engine"):
        for connection in engine.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                num += _knock(f"tcp://127.0.0.1:{connection.laddr.port}")
    return num


def _knock(endpoint: str) -> int:
    frames = [
        [b"wrong", b"x"],
        [b""],
        [b"a", b"b", b"c"],
        [b"\0" * 100, os.urandom(1000)],
        [b"wrong", b"\0" * (65 << 20)],
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        for message in frames:
            socket.send_multipart(message)
        socket.close(linger=500)
    return len(frames)


def garble_replies(run: Run) -> None:
    """Every 40th reply of the engine is noise: the other end of the socket went mad."""
    from headway.engine.client import EngineClient

    receive, num = EngineClient._receive, iter(range(1 << 60))

    def garbled(self: EngineClient, payload: bytes) -> None:
        if (n := next(num)) % 40 == 39 and n < 130:
            run.hit()
            payload = b"\x91" * 5000
        receive(self, payload)

    EngineClient._receive = garbled


def damage_weights(how: str) -> Callable[[Run], None]:
    """The file of version 5 is changed on the disk, after its checksum was taken."""

    def install(run: Run) -> None:
        from headway.weights import DiskChannel

        publish = DiskChannel.publish

        def damaging(self: DiskChannel, version: int, tensors: Any, in_use: Any = ()) -> Any:
            ref = publish(self, version, tensors, in_use)
            if version == 5:
                run.hit()
                with open(ref.path, "r+b") as file:
                    file.truncate(os.path.getsize(ref.path) // 2) if how == "cut" else (
                        file.seek(-40, 2),
                        file.write(b"?"),
                    )
            return ref

        DiskChannel.publish = damaging

    return install


def poison(what: str) -> Callable[[Run], None]:
    """NaN in a parameter, or in one gradient, at step 4."""

    def install(run: Run) -> None:
        from headway.training.learner import TorchLearner

        step = TorchLearner.step

        def poisoned(self: TorchLearner) -> Any:
            if self.policy_version == 4:
                run.hit()
                first = next(iter(self._parameters.values()))
                if what == "gradient":
                    first.grad = torch.full_like(first, float("nan"))
                else:
                    first.data.view(-1)[0] = float("nan")
            return step(self)

        TorchLearner.step = poisoned

    return install


def fill_disk(margin: int) -> Callable[[Run], None]:
    """From step 4 on no file may grow past what the ledger's log has, and `margin` bytes."""

    def install(run: Run) -> None:
        from headway.report.jsonl import JsonlSink

        log = JsonlSink.log

        def filling(self: JsonlSink, record: Any) -> None:
            log(self, record)
            if record.get("step") == 4:
                run.hit()
                size = max(path.stat().st_size for path in run.folder.glob("ledger.sqlite*"))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + margin, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        JsonlSink.log = filling

    return install


@contextlib.contextmanager
def mad_engine(model: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """An HTTP engine behind a proxy that garbles."""

    def serve(pipe: Any, faults: Any) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        fake = FakeSglang(model, key=KEY, max_length=64).start()
        proxy = Proxy(fake.url, every=25)
        pipe.send(proxy.url)
        while True:
            time.sleep(0.1)
            faults.value = proxy.num_faults

    os.environ["HEADWAY_ENGINE_KEY"] = KEY
    with beside(serve) as (url, faults):
        engine = {"engine": "sglang", "engines__url": url, "engines__on_update": "interrupt", "num_steps": 24}
        yield engine | {"engines__max_restarts": 20, "engines__update_timeout_s": 20.0}, faults


@contextlib.contextmanager
def mad_teacher(model: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """A teacher behind HTTP that garbles."""

    def serve(pipe: Any, faults: Any) -> None:
        teacher = Teacher(every=15)
        pipe.send(teacher.url)
        while True:
            time.sleep(0.1)
            faults.value = teacher.num_faults

    with beside(serve) as (url, faults):
        distill = {"distill__teacher": url, "distill__served_model": "x", "distill__tokenizer": str(model)}
        yield distill | {"distill__method": "forward_kl_teacher_topk", "distill__top_k": 4, "num_steps": 12}, faults


@contextlib.contextmanager
def beside(serve: Callable[[Any, Any], None]) -> Iterator[tuple[str, Any]]:
    """A process that serves; its URL and its counter of faults."""
    here, there = _fork.Pipe()
    faults = _fork.Value("i", 0)
    process = _fork.Process(target=serve, args=(there, faults), daemon=True)
    process.start()
    try:
        assert here.poll(60), "the server beside the run did not start"
        yield here.recv(), faults
    finally:
        process.kill()
        process.join()


LOST_WORKER = {"algorithm": "decoupled_ppo", "proximal": "exact_model"}

FAULTS = {
    "engine_killed": Fault("engine killed (kill -9) three times", SLOW, strike=kill("engine", times=3)),
    "engine_paused": Fault("engine stopped for 2 s (SIGSTOP, SIGCONT)", SLOW, strike=freeze(seconds=2)),
    "engine_frozen": Fault(
        "engine stopped for good (SIGSTOP)",
        SLOW | {"engines__update_timeout_s": 4.0, "wait_limit_s": 1.0},
        strike=freeze(seconds=12),
    ),
    "engine_slow": Fault(
        "one of two engines runs a tenth of the time", SLOW | {"engines__num_engines": 2}, strike=slow_down
    ),
    "engine_garbled": Fault("replies of the engine are noise", SLOW, install=garble_replies),
    "strangers": Fault("strangers, noise and 65 MiB at the engine's port", SLOW, strike=knock),
    "trainer_killed": Fault("trainer killed (kill -9) three times", SLOW, strike=kill_trainer, num_strikes=3),
    "trainer_paused": Fault("trainer stopped for 3 s (SIGSTOP, SIGCONT)", SLOW, strike=freeze(seconds=3, whole=True)),
    "trainer_stopped": Fault(
        "orderly stop (SIGTERM) twice", SLOW, strike=stop_trainer, num_strikes=2, stops="headway resume"
    ),
    "worker_killed": Fault("old-logit worker killed", SLOW | LOST_WORKER, strike=kill("proximal")),
    "weights_corrupt": Fault("a byte of a weight file changed", DISK, damage_weights("flip"), stops="its checksum is"),
    "weights_cut": Fault("a weight file cut short", DISK, damage_weights("cut"), stops="cut short"),
    "disk_full": Fault("disk full under the ledger", {}, fill_disk(0), stops="make room"),
    "disk_almost_full": Fault("disk full a little later", {}, fill_disk(30_000), stops="make room"),
    "nan_weights": Fault("NaN in a parameter", {}, poison("parameter"), stops="not finite"),
    "nan_gradient": Fault("NaN in a gradient", {}, poison("gradient")),
    "env_raises": Fault("environment raises on 1 prompt in 5", MISCHIEF | {"task__options__how": "raises"}),
    "env_nan": Fault("rewards of NaN on 1 prompt in 5", MISCHIEF | {"task__options__how": "nan"}),
    "env_never": Fault("environment never returns on 1 in 5", MISCHIEF | {"task__options__how": "never_returns"}),
    "env_blocks": Fault(
        "environment blocks the event loop on 1 in 5",
        MISCHIEF
        | {"task__options__how": "blocks", "rollout__attempts": 1, "rollout__episode_timeout_s": 2.0, "num_steps": 6},
    ),
    "judge_killed": Fault(
        "environment worker killed three times", SLOW | {"task__num_workers": 2}, strike=kill("envs", times=3)
    ),
    "judge_blocks": Fault(
        "a step blocks an environment worker on 1 in 5",
        MISCHIEF
        | {"task__options__how": "blocks", "rollout__attempts": 1, "rollout__episode_timeout_s": 16.0, "num_steps": 6}
        | {"task__num_workers": 2, "wait_limit_s": 10.0},
    ),
    "prompt_raises": Fault("prompt source raises on 1 in 5", MISCHIEF | {"task__options__how": "prompt_raises"}),
    "engine_http": Fault("HTTP engine: hang-ups and malformed answers", serve=mad_engine),
    "teacher_http": Fault("HTTP teacher: hang-ups and malformed answers", serve=mad_teacher),
}
