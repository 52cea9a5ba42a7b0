"""What `scripts/gpu_check.sh` runs, part by part, each in processes of its own; a failed one does not stop the next.

    python scripts/gpu_check.py [--device cuda] [--quick] [--out gpu_check.json] [--only tests head engine run]

All parts together end within `--limit-s`, and none takes more than PART_S: what is not done then is killed.

Writes one JSON file: the machine, and of every part whether it passed, its seconds and its numbers. Exit 1 if one
failed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from headway.engine.torch_engine import TorchEngine
from headway.models.loading import named_weights, save_causal_lm
from headway.models.tiny import character_tokenizer
from headway.types import Sampling

ROOT = Path(__file__).parents[1]
LIMIT_S, PART_S = 480.0, 200.0
"""Of all parts together, and of one."""


class Clock:
    """Seconds that are left for the part under way."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self.next_part()

    def next_part(self) -> None:
        self._part_end = min(self._end, time.monotonic() + PART_S)

    def left_s(self) -> float:
        """Raises RuntimeError when nothing is."""
        left = self._part_end - time.monotonic()
        if left <= 0:
            raise RuntimeError("no time was left")
        return left


def half_billion(quick: bool) -> Any:
    """The shape of Qwen2.5-0.5B with random weights; quick: a thousandth of it."""
    hidden, inner, layers, heads, vocabulary = (64, 128, 2, 4, 1000) if quick else (896, 4864, 24, 14, 151_936)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def command(clock: Clock, *arguments: Any, codes: tuple[int, ...] = (0,), **variables: str) -> str:
    """Standard output of a command, killed with all that it started when its time is up.

    Raises RuntimeError with the end of what it said for an exit not in `codes`.
    """
    limit_s, environment = clock.left_s(), os.environ | variables
    options: dict[str, Any] = {"text": True, "cwd": ROOT, "env": environment, "start_new_session": True}
    process = subprocess.Popen(list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill_session(process)
        raise RuntimeError(f"not done within {limit_s:.0f} s: {''.join(process.communicate())[-1500:]}") from None
    finally:
        kill_session(process)
    if process.returncode not in codes:
        raise RuntimeError(f"exit {process.returncode}: {(out + said)[-3000:]}")
    return out


def kill_session(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def tests(device: str, quick: bool, clock: Clock) -> dict[str, Any]:
    """The device against the CPU."""
    files = ["tests/property/test_device.py", *([] if device == "cpu" else ["tests/unit/test_head.py"])]
    options = ["-q", "-p", "no:cacheprovider", "-m", "cuda or not slow", "--timeout", "120"]
    out = command(clock, sys.executable, "-m", "pytest", *options, *files, HEADWAY_TEST_DEVICE=device)
    return {"summary": out.strip().splitlines()[-1]}


def head(device: str, quick: bool, clock: Clock) -> dict[str, Any]:
    """The fused log-prob head against the plain one: time and peak memory."""
    sizes = ["--tokens", 256, "--hidden", 64, "--repeats", 1] if quick else ["--tokens", 8192, "--hidden", 896]
    out = command(clock, sys.executable, "scripts/bench_head.py", "--device", device, *sizes)
    return json.loads(out.strip().splitlines()[-1])


def engine(device: str, quick: bool, clock: Clock) -> dict[str, Any]:
    """`bench_engine` in a process of its own."""
    options = ["--bench-engine", "--device", device, *(["--quick"] if quick else [])]
    return json.loads(command(clock, sys.executable, __file__, *options).strip().splitlines()[-1])


def bench_engine(device: str, quick: bool) -> dict[str, Any]:
    """The built-in engine on the 0.5B shape: tokens per second at several widths, against transformers' generate."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = half_billion(quick).to(dtype).to(device).eval()
    num_tokens, widths = (16, (4, 8)) if quick else (128, (16, 64, 256))
    found: dict[str, Any] = {"dtype": str(dtype), "tokens_per_request": num_tokens}
    for width in widths:
        one = TorchEngine(model.config, max_slots=width, max_length=64 + num_tokens, device=device, dtype=dtype)
        one.load(named_weights(model), 0)
        prompts = np.random.default_rng(0).integers(5, 1000, (width, 32))
        seconds = {}
        for _ in range(2):  # the first round warms up
            seconds["engine"] = timed(device, partial(one.generate, list(prompts), Sampling(num_tokens)))
            ids = torch.from_numpy(prompts).to(device)
            seconds["generate"] = timed(device, partial(plain_generate, model, ids, num_tokens))
        found[str(width)] = {f"{name}_tokens_per_s": width * num_tokens / s for name, s in seconds.items()}
    return found


def plain_generate(model: Any, ids: torch.Tensor, num_tokens: int) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )


def timed(device: str, work: Callable[[], object]) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def run(device: str, quick: bool, clock: Clock) -> dict[str, Any]:
    """`headway train` on the 0.5B shape: asynchronous, engine and learner on one device, ledger audited, replayed."""
    num_steps = 4 if quick else 8
    batch, longest = (16, 8) if quick else (128, 64)
    with tempfile.TemporaryDirectory() as scratch:
        model, folder = Path(scratch, "model"), Path(scratch, "run")
        save_causal_lm(half_billion(quick), character_tokenizer(), model)
        settings = {
            "model.path": str(model),
            "batch_size": batch,
            "group_size": 8,
            "num_steps": num_steps,
            "max_staleness": 2,
            "sampling.max_response_tokens": longest,
            "engines.num_slots": batch,
            "engines.max_length": longest + 32,
            "engines.device": device,
            "learner.device": device,
            "learner.gradient_cosine": False,
            "evaluation.every": 0,
            "evaluation.test_size": 0,
            "checkpoint.every": 1000,
            "record": True,
        }
        sets = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        headway = (sys.executable, "-m", "headway")
        command(clock, *headway, "train", f"--run={folder}", *sets, COLUMNS="120")
        audit = json.loads(command(clock, *headway, "ledger", folder, "--json"))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        # A device may add in another order each time: whether the replay is exact is a finding here, no fault.
        replayed = json.loads(command(clock, *headway, "replay", folder, "--json", codes=(0, 1)))
    steps = [record for record in records if record["kind"] == "step"][2:]
    names = ("step_s", "train_s", "sampled_tokens_per_s", "trained_tokens_per_s", "publish_lag_s", "learner_idle")
    medians = {name: float(np.median([step[name] for step in steps])) for name in names}
    gap = {name: float(np.median([step[name] for step in steps])) for name in ("mean_abs_delta", "conformance_delta")}
    facts = {"adds_up": audit["ok"], "trained": audit["samples"]["trained"], "replay_exact": replayed["exact"]}
    return medians | gap | facts | {"max_staleness_seen": max(map(int, audit["token_staleness"]))}


PARTS = {"tests": tests, "head": head, "engine": engine, "run": run}


def machine(device: str) -> dict[str, Any]:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 1e9, 1)}
    return facts | {"device": device, "cpus": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="A model of a thousandth of the size.")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="Of all parts together.")
    parser.add_argument("--bench-engine", action="store_true", help="Print the numbers of this part alone.")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; `--device cpu --quick` tries the script without one")
    if options.bench_engine:
        print(json.dumps(bench_engine(options.device, options.quick)))
        return
    clock = Clock(options.limit_s)
    facts: dict[str, Any] = {"machine": machine(options.device), "quick": options.quick, "parts": {}}
    for name in options.only:
        begun = time.monotonic()
        clock.next_part()
        try:
            found = {"passed": True, **PARTS[name](options.device, options.quick, clock)}
        except Exception as error:  # the next part is still worth knowing
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        facts["parts"][name] = found | {"seconds": round(time.monotonic() - begun, 1)}
        print(f"{name}: {json.dumps(facts['parts'][name])}", flush=True)
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written: {options.out}")
    sys.exit(not all(part["passed"] for part in facts["parts"].values()))


if __name__ == "__main__":
    main()
