"""What the controller costs a sample: admission, episode, group, ledger and batch, with an engine that costs nothing.

    python scripts/bench_controller.py [--samples 8192]

Prints a table, then one JSON line.
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

GROUP_SIZE, GROUPS_PER_STEP, NUM_TOKENS = 8, 32, 16


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

    def affine(self) -> Callable[[], Awaitable[Engine]]:
        async def pick() -> Engine:
            return self.engine  # pyright: ignore[reportReturnType]

        return pick


async def measure(folder: Path, num_samples: int) -> float:
    """Seconds of one sample from issue to committed step."""
    num_steps = num_samples // (GROUP_SIZE * GROUPS_PER_STEP)
    tokenizer, pool, signal = character_tokenizer(), InstantPool(), Signal()
    with closing(Ledger(folder / "ledger.sqlite", group_size=GROUP_SIZE, create=True)) as ledger:
        rollouts = Rollouts(
            environment=Addition(tokenizer),
            engines=pool,  # pyright: ignore[reportArgumentType]
            ledger=ledger,
            admission=Admission(max_staleness=4, groups_per_step=GROUPS_PER_STEP),
            signal=signal,
            waits=Waits(limit_s=60, say=print),
            settings=EpisodeSettings(Sampling(NUM_TOKENS), GROUP_SIZE, 0, NUM_TOKENS, 1, 1, 60.0),
            decode=partial(decode, tokenizer),
            total_groups=num_steps * GROUPS_PER_STEP,
            watcher=Watcher(),
        )
        running = asyncio.create_task(rollouts.run())
        begun = time.perf_counter()
        for step in range(num_steps):
            groups = await rollouts.whole_groups()
            prepared = prepare(groups, step=step, policy_version=step, max_staleness=4, over_bound="wait")
            ledger.commit_step(step, step, [g.group_id for g in groups], token_staleness=prepared.token_staleness)
            batch_metrics(prepared)
            pool.engine.version = step + 1
            signal.notify()
        seconds = time.perf_counter() - begun
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert ledger.audit(max_staleness=4).ok
    return seconds / (num_steps * GROUP_SIZE * GROUPS_PER_STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    options = parser.parse_args()
    times = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            times.append(asyncio.run(measure(Path(folder), options.samples)) * 1e3)
    median = sorted(times)[1]
    table = Table("controller and ledger", "ms per sample")
    table.add_row(f"median of 3 rounds of {options.samples} samples", f"{median:.3f}")
    Console().print(table)
    print(json.dumps({"bench": "controller", "ms_per_sample": median, "rounds": times}))


if __name__ == "__main__":
    main()
