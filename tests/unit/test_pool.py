"""The pool: who gets the next request, and that a slow, silent or dead engine holds up nobody."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.engine.conformance import EngineDisagrees
from headway.protocols import EngineDied, WeightsRefused
from headway.runtime.local import Check, EngineLost, EnginePool, trust
from headway.runtime.seats import Seat, pick
from headway.runtime.signal import Signal
from headway.types import WeightRef


class Scripted:
    """An engine's process and client in one, which does as it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.client, self.last_status = name, self, None
        self.num_pending, self.version = 0, -1
        self.taken: list[int] = []
        self.returned: list[Exception] = []
        self.may_update, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_update.set()
        self.may_answer.set()
        self.code: int | None = None
        self.refuses = self.dies_at_second_version = False

    def poll(self) -> int | None:
        return self.code

    async def update_weights(self, ref: WeightRef) -> None:
        await self.may_update.wait()
        if self.dies_at_second_version and self.taken:
            self.code = -9
            await asyncio.Event().wait()
        if self.refuses:
            raise WeightsRefused(f"version {ref.version} refused")
        self.taken.append(ref.version)

    async def status(self) -> None:
        await self.may_answer.wait()

    async def interrupt(self) -> None: ...

    def give_back(self, error: Exception) -> None:
        self.returned.append(error)

    def fail_all(self, error: Exception) -> None:
        self.returned.append(error)

    def kill(self) -> None:
        self.code = -9

    def log_tail(self) -> str:
        return ""

    def close(self) -> None: ...
    def stop(self) -> None: ...


def ref(version: int) -> WeightRef:
    return WeightRef(version, f"v{version}", "")


Work = Callable[[EnginePool, list[Scripted]], Awaitable[None]]


def with_pool(work: Work, *, num_engines: int = 3, check: Check = trust, **changes: Any) -> list[str]:
    """Run `work` with a supervised pool at version 0; returns what the pool said."""
    said: list[str] = []

    async def main() -> None:
        started: list[Scripted] = []

        def launch(name: str, log_path: Path) -> Any:
            started.append(Scripted(name))
            return started[-1]

        options = {"num_slots": 4, "max_restarts": 3, "patience_s": 0.3, "stall_s": 0.3} | changes
        pool = EnginePool(launch, num_engines=num_engines, logs=Path(), signal=Signal(), say=said.append, **options)
        await pool.start(ref(0), check=check)
        started.sort(key=lambda engine: engine.name)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(pool.supervise())
            await work(pool, started)
            watching.cancel()
        await pool.close()

    asyncio.run(main())
    return said


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_slow_engine_holds_up_one_update_for_a_moment_and_then_skips_to_the_newest():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        loop, slow = asyncio.get_running_loop(), engines[1]
        slow.may_update.clear()
        begun = loop.time()
        await pool.update(ref(1))
        assert loop.time() - begun >= 1.0
        begun = loop.time()
        for version in range(2, 6):
            await pool.update(ref(version))
        assert loop.time() - begun < 3.0  # not a second for each
        assert pool.metrics() == {
            "num_engines_serving": 3,
            "engine_lag": {"engine-0": 0, "engine-1": 5, "engine-2": 0},
            "engine_lag_max": 5,
        }
        assert pool.versions_in_use() == {0, 1, 5}
        slow.may_update.set()
        await until(lambda: pool.oldest_version == 5)
        assert slow.taken == [0, 1, 5]

    with_pool(work, patience_s=1.0)


def test_an_update_of_everyone_waits_for_the_last():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[2].may_update.clear()
        update = asyncio.ensure_future(pool.update(ref(1), everyone=True))
        await asyncio.sleep(0.6)
        assert not update.done()
        engines[2].may_update.set()
        await update
        assert pool.oldest_version == 1

    with_pool(work)


def test_a_dead_engine_is_not_waited_for_and_joins_again_at_the_newest_version():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[0].code = -9
        for version in (1, 2, 3):
            await pool.update(ref(version))
        await until(lambda: len(engines) == 4 and engines[3].taken == [3] and pool.oldest_version == 3)
        assert pool.metrics()["num_engines_serving"] == 3
        assert pool.num_restarts == 1 and isinstance(engines[0].returned[0], EngineDied)

    said = with_pool(work)
    assert any("engine-0 died (exit -9)" in line for line in said)


def test_a_silent_engine_gets_no_requests_its_own_go_elsewhere_and_it_is_welcome_back():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        silent = engines[0]
        silent.may_answer.clear()
        silent.may_update.clear()
        for other in engines[1:]:
            other.num_pending = 3
        await until(lambda: bool(silent.returned))
        assert isinstance(silent.returned[0], EngineDied)
        await pool.update(ref(1))
        assert await pool.affine()() is not silent
        assert pool.metrics()["num_engines_serving"] == 2
        silent.may_answer.set()
        silent.may_update.set()
        await until(
            lambda: pool.metrics() == {"num_engines_serving": 3, "engine_lag": lags(0, 0, 0), "engine_lag_max": 0}
        )
        assert await pool.affine()() is silent

    said = with_pool(work)
    assert any("engine-0 has not answered for 0.3 s; asking other engines" in line for line in said)
    assert "engine-0 answers again" in said


def lags(*values: int) -> dict[str, int]:
    return {f"engine-{i}": value for i, value in enumerate(values)}


def test_the_only_engine_is_never_given_up_for_being_silent():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[0].may_answer.clear()
        await asyncio.sleep(0.8)
        assert not engines[0].returned and pool.metrics()["num_engines_serving"] == 1
        engines[0].may_answer.set()

    with_pool(work, num_engines=1)


def test_an_engine_that_dies_at_every_update_ends_the_run():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        for version in range(1, 20):
            for engine in engines:
                engine.dies_at_second_version = True
            await pool.update(ref(version))

    with pytest.raises(BaseExceptionGroup) as caught:
        with_pool(work, num_engines=1)
    assert caught.group_contains(EngineLost, match="engine-0 failed 4 times without taking a new version")


def test_weights_that_a_straggler_refuses_end_the_run_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.runtime.local._PING_S", 0.2)

    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[1].may_update.clear()
        engines[1].refuses = True
        await pool.update(ref(1))
        engines[1].may_update.set()
        await asyncio.sleep(10)

    with pytest.raises(BaseExceptionGroup) as caught:
        with_pool(work)
    assert caught.group_contains(WeightsRefused, match="version 1 refused")


def test_every_engine_is_checked_whenever_it_has_arrived_late_and_restarted_ones_too():
    checked: list[tuple[str, int]] = []

    async def check(version: int, engines: Any) -> None:
        checked.extend((name, version) for name in engines)

    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[1].may_update.clear()
        await pool.update(ref(1))
        assert set(checked) == {*((f"engine-{i}", 0) for i in range(3)), ("engine-0", 1), ("engine-2", 1)}
        engines[1].may_update.set()
        await until(lambda: ("engine-1", 1) in checked)
        engines[0].code = -9
        await until(lambda: checked.count(("engine-0", 1)) == 2)

    with_pool(work, check=check)


def test_an_engine_takes_no_other_version_while_it_is_checked():
    may_end = asyncio.Event()

    async def check(version: int, engines: Any) -> None:
        if version == 1 and "engine-0" in engines:
            await may_end.wait()

    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        await pool.update(ref(1))
        await pool.update(ref(2))
        await asyncio.sleep(0.3)
        assert engines[0].taken == [0, 1] and engines[1].taken == [0, 1, 2]
        may_end.set()
        await until(lambda: engines[0].taken == [0, 1, 2])

    with_pool(work, check=check)


def test_a_late_engine_that_disagrees_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.runtime.local._PING_S", 0.2)

    async def check(version: int, engines: Any) -> None:
        if version == 1 and "engine-1" in engines:
            raise EngineDisagrees("engine-1 says it holds version 1")

    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[1].may_update.clear()
        await pool.update(ref(1))
        engines[1].may_update.set()
        await asyncio.sleep(10)

    with pytest.raises(BaseExceptionGroup) as caught:
        with_pool(work, check=check)
    assert caught.group_contains(EngineDisagrees, match="engine-1 says")


def test_a_group_is_issued_at_the_version_of_the_least_loaded_engine_that_admits_it():
    async def work(pool: EnginePool, engines: list[Scripted]) -> None:
        engines[0].may_update.clear()
        await pool.update(ref(1))
        engines[1].num_pending, engines[2].num_pending = 2, 1
        assert pool.version_for(lambda version: True) == 0
        assert pool.version_for(lambda version: version >= 1) == 1
        assert pool.version_for(lambda version: version >= 2) is None
        assert await pool.affine(oldest=1)() is engines[2]
        assert await pool.affine(oldest=0)() is engines[0]
        engines[0].may_update.set()

    with_pool(work)


def seat(name: str, num_pending: int, version: int = 0) -> Seat:
    engine = Scripted(name)
    engine.num_pending = num_pending
    return Seat(name, Path(), engine, version)  # pyright: ignore[reportArgumentType]


def test_members_of_a_group_stay_together_while_there_is_room():
    home, other = seat("a", 3), seat("b", 0)
    assert pick([home, other], home, oldest=0, num_slots=4) is home
    assert pick([home, other], None, oldest=0, num_slots=4) is other


def test_a_member_that_would_queue_goes_where_a_slot_is_free_and_only_then():
    home, free, full = seat("a", 4), seat("b", 3), seat("c", 9)
    assert pick([home, free], home, oldest=0, num_slots=4) is free
    assert pick([home, full], home, oldest=0, num_slots=4) is home


def test_a_group_never_moves_to_an_engine_with_an_older_version_than_it_was_issued_at():
    newer, older = seat("a", 9, version=2), seat("b", 0, version=1)
    assert pick([newer, older], None, oldest=2, num_slots=4) is newer
    assert pick([older], None, oldest=2, num_slots=4) is None
