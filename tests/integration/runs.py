"""Small real runs through the command line, as a user would start them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from headway.cli import app
from headway.models.loading import save_causal_lm
from headway.models.tiny import character_tokenizer

PATIENCE = float(os.environ.get("HEADWAY_TEST_PATIENCE", "1"))
"""Multiplies the time limits of tests that wait for processes."""

SMALL = {
    "task.name": "parity_task:Parity",
    "task.options.digits": 1,
    "optimizer.lr": 1e-2,
    "batch_size": 16,
    "group_size": 4,
    "num_steps": 8,
    "max_staleness": 2,
    "sampling.max_response_tokens": 3,
    "engines.num_slots": 8,
    "engines.max_length": 32,
    "evaluation.every": 3,
    "evaluation.size": 8,
    "evaluation.test_size": 8,
    "checkpoint.every": 3,
}
"""A run of seconds: one-digit sums, 4 groups of 4 a step.

Rewards differ inside groups and the rate is high, so that parameters move: a claim about bits could not fail otherwise.
"""


_SIZES: dict[str, Any] = {
    "vocab_size": len(character_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def small_model(directory: Path, head_dim: int = 16) -> Path:
    """An untrained two-layer model with the character tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**_SIZES, "head_dim": head_dim}
    return save_causal_lm(Qwen3ForCausalLM(Qwen3Config(**sizes)), character_tokenizer(), directory)


def small_mixture(directory: Path) -> Path:
    """The same as a mixture of four experts, two for each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **experts))
    return save_causal_lm(model, character_tokenizer(), directory)


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def headway(*arguments: str | Path) -> Done:
    """Run a command to its end, in this process: starting an interpreter would take longer than most of them do."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def train_arguments(run: Path, model: Path, **overrides: object) -> list[str]:
    """`train` with SMALL and these settings; dots in keys are written as two underscores."""
    settings = SMALL | {"model.path": str(model)} | {k.replace("__", "."): v for k, v in overrides.items()}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    return ["train", f"--run={run}", *sets]


def train(run: Path, model: Path, **overrides: object) -> Done:
    """A small run to its end; its output is part of the failure when it fails."""
    result = headway(*train_arguments(run, model, **overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def ledger(run: Path) -> dict:
    """The audit, which must add up."""
    result = headway("ledger", run, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def assert_moving(run: Path, least: float = 0.5) -> None:
    """At least that share of its steps had a gradient, so what is said of its parameters can be wrong."""
    norms = [record["grad_norm"] for record in records(run, "step")]
    assert sum(norm > 0 for norm in norms) >= least * len(norms), norms


def records(run: Path, kind: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@dataclass(frozen=True)
class Running:
    """A command under way, to be killed."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, *arguments: str | Path, log: Path, process_group: int | None = None) -> "Running":
        """`process_group`: as of `subprocess.Popen`; 0 gives it one of its own."""
        with log.open("a") as file:
            command = [sys.executable, "-m", "headway", *map(str, arguments)]
            options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "process_group": process_group}
            return cls(subprocess.Popen(command, text=True, **options))

    def engines(self) -> list[psutil.Process]:
        """Its engine processes, once they run."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if "headway.engine.server" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> list[psutil.Process]:
        """kill -9 of the main process; returns the engines it leaves behind."""
        left = self.engines()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return left


def wait_for(condition, *, limit_s: float, what: str) -> None:
    """Poll until `condition()` holds; fails with `what` after the limit (longer on a busy machine: PATIENCE)."""
    deadline = time.monotonic() + limit_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit_s} s"
        time.sleep(0.05)
