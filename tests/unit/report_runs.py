"""Run folders as a run would leave them, made in a moment: for whatever reads run folders."""

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import parse_config
from headway.ledger import Ledger
from headway.types import Response

BATCH, GROUP, TOKENS = 4, 2, 3
QUADRANTS = ("positive_up", "positive_down", "negative_up", "negative_down")


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl with everything a run of ESTR with proximal log-probs would log."""
    wave = np.sin(step / 3)
    quadrants = {f"{kind}_{q}": 0.01 * (i + 1) for kind in ("share", "stopped") for i, q in enumerate(QUADRANTS)}
    return {
        "kind": "step",
        "step": step,
        "policy_version": step,
        "reward": 0.5 + 0.02 * step + 0.1 * wave,
        "entropy": 1.0 - 0.02 * step,
        "grad_norm": 1.0 + 0.2 * wave,
        "grad_cosine": 0.1 * wave,
        "staleness_token_mean": 1.0,
        "staleness_token_max": 2.0,
        "staleness_sample_mean": 1.5,
        "d_intra": 0.5,
        "d_inter": 1.0,
        "mixed_version_fraction": 0.25,
        "token_staleness": {"0": 4, "1": 6, "2": 2},
        "num_tokens": float(BATCH * TOKENS),
        "mean_abs_delta": 0.05,
        "k3_behavior_policy": 0.002,
        "ess_tokens": 0.95,
        "ess_responses": 0.8,
        "mean_abs_log_rd": 0.01,
        "mean_abs_log_rs": 0.04,
        "loss_balance": 1.2,
        "loss_positive": 0.6,
        "loss_negative": 0.5,
        "stopped_fraction": 0.1,
        "masked_fraction": 0.02,
        **quadrants,
        "elapsed_s": 10.0 + 2.0 * step,
        "step_s": 2.0,
        "learner_idle": 0.3,
        "engine_idle": 0.6,
        "sampled_tokens_per_s": 900.0,
        "trained_tokens_per_s": 3000.0,
        "delta_by_entropy": by_entropy(),
        "delta_at_switches": at_switches(),
    } | changes


def by_entropy() -> dict[str, Any]:
    edges, deltas = [0.0, 0.01, 0.1, 1.0], [0.0, 0.001, 0.01, 0.1, 1.0]
    num = [[10, 2, 0, 0, 0], [4, 8, 2, 0, 0], [0, 4, 8, 2, 0], [0, 0, 4, 8, 1]]
    sums = [0.01, 0.08, 0.7, 3.0]
    outside = {"outside_estr": [1, 1, 0, 0], "outside_clip": [0, 0, 1, 6]}
    return {"entropy_edges": edges, "delta_edges": deltas, "num": num, "sum_abs_delta": sums, **outside} | {
        "tau": 1.6,
        "entropy_floor": 0.01,
        "clip": 0.2,
    }


def at_switches() -> dict[str, Any]:
    offsets = list(range(-3, 4))
    return {
        "offsets": offsets,
        "num": [2, 3, 4, 4, 3, 2, 1],
        "sum_abs_delta": [0.1, 0.2, 0.3, 0.1, 0.05, 0.02, 0.01],
        "sum_entropy": [1.0, 2.0, 2.5, 3.0, 2.0, 1.0, 0.5],
    }


def evaluation(version: int, split: str = "validation") -> dict[str, Any]:
    return {"kind": "evaluation", "split": split, "policy_version": version, "accuracy": 0.6 + 0.01 * version}


def spans(num_steps: int) -> list[dict[str, Any]]:
    """Two engines that decode, a learner that trains and waits, weights on their way."""
    found: list[dict[str, Any]] = []
    for step in range(num_steps):
        begun = 1000.0 + 2.0 * step
        found += [
            {"lane": "learner", "what": "train", "start": begun, "end": begun + 1.2, "step": step},
            {"lane": "learner", "what": "wait", "start": begun + 1.2, "end": begun + 2.0, "knob": "num_engines"},
            {"lane": "sync", "what": "sync", "start": begun + 1.2, "end": begun + 1.3, "version": step + 1},
            {"lane": "engine-0", "what": "decode", "start": begun, "end": begun + 2.0, "share": 0.4},
            {"lane": "engine-1", "what": "decode", "start": begun, "end": begun + 2.0, "share": 0.9},
        ]
    found.append({"lane": "gate", "what": "interrupted", "start": 1001.0, "end": 1001.5})
    found.append({"lane": "engine-1", "what": "down", "start": 1002.0, "end": 1003.0})
    return found


def make_run(path: Path, *, num_steps: int = 6, of: int = 6, seed_reward: float = 0.0, **settings: Any) -> Path:
    """A run of `of` steps that stands at `num_steps`: config, metrics, timeline and a ledger that adds up."""
    path.mkdir(parents=True)
    values = {"num_steps": of, "batch_size": BATCH, "group_size": GROUP, "algorithm": "estr", "max_staleness": 2}
    (path / "config.toml").write_text(parse_config(values | settings).to_toml())
    records = [evaluation(0, "test"), *(step_record(step) for step in range(num_steps)), evaluation(num_steps)]
    for record in records:
        if "reward" in record:
            record["reward"] += seed_reward
    if num_steps == of:
        records.append(evaluation(of, "test"))
    write_lines(path / "metrics.jsonl", records)
    write_lines(path / "timeline.jsonl", spans(num_steps))
    with closing(Ledger(path / "ledger.sqlite", group_size=GROUP, create=True)) as ledger:
        for step in range(num_steps):
            groups = range(step * BATCH // GROUP, (step + 1) * BATCH // GROUP)
            for group in groups:
                ledger.issue(group, step)
                for member in range(GROUP):
                    ledger.finish(group, member, response(step))
            ledger.commit_step(step, step, list(groups), token_staleness=Counter({0: BATCH * TOKENS}))
        lost = num_steps * BATCH // GROUP
        ledger.issue(lost, num_steps)
        ledger.discard(lost, 0, 5, "<script>alert(1)</script>")
        ledger.drop(lost, "its environment raised")
    return path


def response(version: int) -> Response:
    return Response(
        token_ids=np.arange(TOKENS, dtype=np.int32),
        mask=np.ones(TOKENS, np.bool_),
        versions=np.full(TOKENS, version, np.int32),
        reward=1.0,
    )


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
