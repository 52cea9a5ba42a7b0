"""The engine against `transformers` generate: same model, same prompts, one process, interleaved runs, medians.

    python scripts/bench_engine.py [--quick] [--threads 1] [--starts 5] [--sizes 0.4M 3M 135M]

Where a process finds its memory moves the ratio of small models by ten per cent either way, so equal lengths at 0.4M
are measured in `--starts` fresh processes; the row is that of the median ratio, and all ratios are in the JSON.

Equal lengths: 64 requests of 64 new tokens. Long tail: a queue of requests of unlike lengths; `generate` takes it in
static batches, each as long as its longest member, the engine refills its slots. Both sample at temperature 1 from the
full vocabulary; the engine also records log-probs and entropy. Prints a table, then one JSON line.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from headway.engine.torch_engine import TorchEngine
from headway.types import Sampling

PROMPT_TOKENS = 16


def build(size: str) -> Any:
    """A model of about `size` parameters with random weights."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    if size == "135M":
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, **ends,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()
    hidden, layers, inner = {"0.4M": (96, 4, 256), "3M": (256, 4, 704)}[size]
    config = Qwen3Config(
        vocab_size=32, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, **ends,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def run_generate(model: Any, prompts: np.ndarray, lengths: np.ndarray, batch: int) -> None:
    """Static batches, in order of arrival."""
    for start in range(0, len(prompts), batch):
        ids = torch.from_numpy(prompts[start : start + batch])
        longest = int(lengths[start : start + batch].max())
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip


def run_engine(engine: TorchEngine, prompts: np.ndarray, lengths: np.ndarray) -> None:
    """Everything submitted at once, stepped until done."""
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(i, prompt, Sampling(max_tokens=int(length), seed=i))
    while engine.has_work:
        engine.step()


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(size: str, lengths: np.ndarray, *, repeats: int, batch: int = 64) -> dict[str, float]:
    """Median seconds of both sides and their ratio, from interleaved runs after one warm-up each."""
    torch.manual_seed(0)
    model = build(size)
    prompts = np.random.default_rng(0).integers(1, 32, (len(lengths), PROMPT_TOKENS))
    engine = TorchEngine(model.config, max_slots=batch, max_length=PROMPT_TOKENS + int(lengths.max()))
    engine.load(dict(model.named_parameters()), 0)
    warm_up = np.minimum(lengths[:batch], 4)
    run_generate(model, prompts[:batch], warm_up, batch)
    run_engine(engine, prompts[:batch], warm_up)
    theirs, ours = [], []
    for _ in range(repeats):
        theirs.append(timed(lambda: run_generate(model, prompts, lengths, batch)))
        ours.append(timed(lambda: run_engine(engine, prompts, lengths)))
    num_tokens, slow, fast = int(lengths.sum()), statistics.median(theirs), statistics.median(ours)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": num_tokens,
        "generate_tokens_per_s": num_tokens / slow,
        "engine_tokens_per_s": num_tokens / fast,
        "ratio": slow / fast,
    }


def compare_afresh(size: str, lengths: np.ndarray, *, repeats: int, starts: int, threads: int) -> dict[str, Any]:
    """`compare` in processes of their own, one after the other: the one of the median ratio, and all ratios."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, set_up, (threads,), max_tasks_per_child=1) as pool:
        found = [pool.submit(compare, size, lengths, repeats=repeats).result() for _ in range(starts)]
    found.sort(key=lambda r: r["ratio"])
    return {**found[(starts - 1) // 2], "ratios": [r["ratio"] for r in found]}


def set_up(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.set_verbosity_error()


def long_tail(count: int, longest: int) -> np.ndarray:
    """Lognormal lengths, cut to [4, longest]: median longest / 8, a few at the limit."""
    draws = np.random.default_rng(1).lognormal(np.log(longest / 8), 1.0, count)
    return np.clip(draws, 4, longest).astype(np.int64)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, no long runs at 135M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", nargs="+", default=["0.4M", "3M", "135M"], choices=["0.4M", "3M", "135M"])
    parser.add_argument("--starts", type=int, default=5, help="processes that measure equal lengths at 0.4M")
    options = parser.parse_args()
    set_up(options.threads)
    results = {}
    for size in options.sizes:
        tokens = (8 if options.quick else 24) if size == "135M" else 64
        starts = options.starts if size == "0.4M" else 1
        results[f"{size} equal"] = compare_afresh(
            size, np.full(64, tokens), repeats=5, starts=starts, threads=options.threads
        )
        if size != "135M":
            lengths = long_tail(128 if options.quick else 256, 256)
            results[f"{size} long tail"] = compare(size, lengths, repeats=3)
    table = Table("case", "parameters", "tokens", "generate tok/s", "engine tok/s", "ratio")
    for name, r in results.items():
        speeds = (f"{r['generate_tokens_per_s']:,.0f}", f"{r['engine_tokens_per_s']:,.0f}", f"{r['ratio']:.2f}×")
        table.add_row(name, f"{r['parameters']:,}", f"{r['tokens']:,}", *speeds)
    Console().print(table)
    print(json.dumps({"bench": "engine", "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
