"""What the controller costs a sample: admission, episode, group, ledger and batch, with an engine that costs nothing.

    python scripts/bench_controller.py [--samples 8192] [--queued 1000 100000]

`--queued`: then the same with that many samples in flight at once (and twice as many in all), and the time
of one audit of the whole ledger. Prints tables, then one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from headway.envs.addition import Addition
from headway.ledger import Ledger
from headway.models.tiny import character_tokenizer
from headway.protocols import Engine
from headway.runtime.batch import batch_metrics, prepare
from headway.runtime.proximal import Watcher
from headway.runtime.rollouts import EpisodeSettings, Rollouts
from headway.runtime.signal import Signal
from headway.runtime.task import decode
from headway.runtime.waits import Waits
from headway.staleness import Admission
from headway.types import Completion, Ints, LogprobOrigin, Sampling

GROUP_SIZE, GROUPS_PER_STEP, NUM_TOKENS, STALENESS = 8, 32, 16, 4


class InstantEngine:
    """Answers at once, always the same."""

    version = 0

    async def generate(self, token_ids: Ints, sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        tokens = np.full(NUM_TOKENS, 5, np.int32)
        return Completion(
            token_ids=tokens,
            versions=np.full(NUM_TOKENS, self.version, np.int32),
            finish_reason="length",
            logprobs=np.full(NUM_TOKENS, -1.0, np.float32),
            entropy=np.full(NUM_TOKENS, 1.0, np.float32),
        )

    def origin(self, sampling: Sampling) -> LogprobOrigin:
        return LogprobOrigin(role="behavior", engine="instant", dtype="float32")


class InstantPool:
    """The face of `EnginePool` that rollouts see."""

    def __init__(self) -> None:
        self.engine = InstantEngine()

    @property
    def oldest_version(self) -> int:
        return self.engine.version

    def version_for(self, admits: Callable[[int], bool]) -> int | None:
        return self.engine.version if admits(self.engine.version) else None

    def affine(self, oldest: int) -> Callable[[], Awaitable[Engine]]:
        async def pick() -> Engine:
            return self.engine  # pyright: ignore[reportReturnType]

        return pick


async def measure(folder: Path, num_samples: int, groups_per_step: int = GROUPS_PER_STEP) -> tuple[float, float, int]:
    """Milliseconds of one sample from issue to committed step; seconds of an audit; bytes of the ledger a sample."""
    num_steps = max(1, num_samples // (GROUP_SIZE * groups_per_step))
    tokenizer, pool, signal = character_tokenizer(), InstantPool(), Signal()
    path = folder / "ledger.sqlite"
    with closing(Ledger(path, group_size=GROUP_SIZE, create=True)) as ledger:
        rollouts = Rollouts(
            environment=Addition(tokenizer),
            engines=pool,  # pyright: ignore[reportArgumentType]
            ledger=ledger,
            admission=Admission(max_staleness=STALENESS, groups_per_step=groups_per_step),
            signal=signal,
            waits=Waits(limit_s=600, say=print),
            settings=EpisodeSettings(Sampling(NUM_TOKENS), GROUP_SIZE, 0, NUM_TOKENS, 1, 1, 600.0),
            decode=partial(decode, tokenizer),
            total_groups=num_steps * groups_per_step,
            watcher=Watcher(),
        )
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:  # rollouts that fail end the measurement
            running = tasks.create_task(rollouts.run())
            for step in range(num_steps):
                groups = await rollouts.whole_groups()
                prepared = prepare(groups, step=step, policy_version=step, max_staleness=STALENESS, over_bound="wait")
                ledger.commit_step(step, step, [g.group_id for g in groups], token_staleness=prepared.token_staleness)
                batch_metrics(prepared)
                pool.engine.version = step + 1
                signal.notify()
            seconds = time.perf_counter() - begun
            running.cancel()
        begun = time.perf_counter()
        assert ledger.audit(max_staleness=STALENESS).ok
        audit_s = time.perf_counter() - begun
    num_done = num_steps * GROUP_SIZE * groups_per_step
    return seconds / num_done * 1e3, audit_s, path.stat().st_size // num_done


def in_flight(num_queued: int) -> tuple[float, float, int]:
    """The same with `num_queued` samples in flight: S + 1 batches of them."""
    with tempfile.TemporaryDirectory() as folder:
        groups_per_step = max(1, num_queued // (GROUP_SIZE * (STALENESS + 1)))
        return asyncio.run(measure(Path(folder), max(2 * num_queued, 8192), groups_per_step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--queued", type=int, nargs="*", default=[])
    options = parser.parse_args()
    times = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            times.append(asyncio.run(measure(Path(folder), options.samples))[0])
    median = sorted(times)[1]
    table = Table("controller and ledger", "ms per sample")
    table.add_row(f"median of 3 rounds of {options.samples} samples", f"{median:.3f}")
    Console().print(table)
    queued = {num: in_flight(num) for num in options.queued}
    if queued:
        table = Table("samples in flight", "ms per sample", "one audit, s", "ledger, bytes per sample")
        for num, (cost, audit_s, num_bytes) in queued.items():
            table.add_row(f"{num:,}", f"{cost:.3f}", f"{audit_s:.2f}", str(num_bytes))
        Console().print(table)
    print(json.dumps({"bench": "controller", "ms_per_sample": median, "rounds": times, "queued": queued}))


if __name__ == "__main__":
    main()
