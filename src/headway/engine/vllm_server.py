"""Starting a vLLM server of its own Python environment, or joining one.

`python -m headway.engine.vllm_server MODEL FOLDER [cpu]` writes the folder and prints the command that starts a server
to be joined.
"""

import asyncio
import math
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import headway
from headway.engine.gpus import visible_gpus
from headway.engine.hosting import JoinedServer, ServerProcess, free_port, start_server, wait_healthy
from headway.engine.messages import EngineSettings
from headway.engine.vllm import VllmEngine
from headway.engine.weight_files import expected_tensors, untied_copy

SERVER = "vllm.entrypoints.openai.api_server"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPU is compiled for."""

PLUGIN = "headway.engine.vllm_plugin"


def start_vllm(
    settings: EngineSettings,
    name: str,
    log_path: Path,
    *,
    python: str,
    server_args: Sequence[str] = (),
    start_timeout_s: float = 600.0,
    timeout_s: float = 60.0,
) -> ServerProcess:
    """Start `python -m vllm…` on a copy of the model with a head of its own; blocking, a minute.

    Raises RuntimeError with the tail of its log when it does not become healthy.
    """
    place = log_path.with_suffix("")
    url, key = f"http://127.0.0.1:{free_port()}", secrets.token_hex(16)
    model = untied_copy(Path(settings.config), place / "model")
    command = [python, "-m", SERVER, *server_arguments(settings, model, url), *server_args]
    process = start_server(
        command,
        variables=server_environment(settings, place, key) | {"HEADWAY_PARENT": str(os.getpid())},
        url=url,
        log_path=log_path,
        name=name,
        timeout_s=start_timeout_s,
    )
    return ServerProcess(process, VllmEngine(url, key=key, **client_options(settings, name, timeout_s)), log_path)


def join_vllm(
    settings: EngineSettings,
    name: str,
    log_path: Path,
    *,
    url: str,
    key: str,
    start_timeout_s: float = 60.0,
    timeout_s: float = 60.0,
) -> JoinedServer:
    """A server that runs already, found fit to serve this run; blocking. Raises RuntimeError."""
    if not wait_healthy(url, start_timeout_s):
        raise RuntimeError(f"engine {name!r}: no healthy vLLM server at {url} within {start_timeout_s:g} s")
    options = client_options(settings, name, timeout_s)
    # A client belongs to one event loop: this one only asks.
    asyncio.run(VllmEngine(url, key=key, **options).hello())
    return JoinedServer(VllmEngine(url, key=key, **options))


def client_options(settings: EngineSettings, name: str, timeout_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "on_update": settings.on_update,
        "vocab_size": AutoConfig.from_pretrained(settings.config).vocab_size,
        "max_slots": settings.max_slots,
        "max_length": settings.max_length,
        "expected": expected_tensors(Path(settings.config)),
        "record_logprobs": settings.record_logprobs,
        "dtype": settings.dtype,
        "timeout_s": timeout_s,
    }


def server_arguments(settings: EngineSettings, model: Path, url: str) -> list[str]:
    """Command line of a server on loopback that this adapter can work with."""
    host, _, port = url.removeprefix("http://").partition(":")
    arguments = ["--model", str(model), "--host", host, "--port", port, "--dtype", settings.dtype]
    arguments += ["--max-model-len", str(settings.max_length), "--max-num-seqs", str(settings.max_slots)]
    arguments += ["--skip-tokenizer-init", "--generation-config", "vllm", "--enable-scale-out"]
    arguments += ["--logits-processors", f"{PLUGIN}:Sampling", "--worker-extension-cls", f"{PLUGIN}.Worker"]
    arguments += ["--middleware", f"{PLUGIN}.Guard", "--disable-uvicorn-access-log"]
    # Compiling a model on CPU takes longer than most tests run.
    return [*arguments, "--enforce-eager"] if settings.device == "cpu" else arguments


def server_environment(settings: EngineSettings, place: Path, key: str) -> dict[str, str]:
    """Environment variables of such a server; puts this package, and nothing beside it, on its path."""
    package = place / "plugin" / "headway"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.unlink(missing_ok=True)
    package.symlink_to(Path(headway.__path__[0]).resolve(), target_is_directory=True)
    variables = {
        "PYTHONPATH": str(package.parent.resolve()),
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",  # opens pause, resume and collective_rpc; the guard asks for the key there too
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if settings.device == "cpu":
        variables |= {
            "OMP_NUM_THREADS": str(settings.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(_cache_gib(settings)),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return variables | visible_gpus(settings.device)


def _cache_gib(settings: EngineSettings) -> int:
    """Whole GiB that hold every slot at full length."""
    config = AutoConfig.from_pretrained(settings.config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    return math.ceil(per_token * settings.max_slots * settings.max_length / 2**30)


def main() -> None:
    """Write the folder and say how to start the server."""
    if len(sys.argv) not in (3, 4):
        raise SystemExit("usage: python -m headway.engine.vllm_server MODEL FOLDER [cpu]")
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    settings = EngineSettings(config=str(source), max_slots=64, max_length=512, device=(*sys.argv, "cuda")[3])
    variables = server_environment(settings, folder, "$HEADWAY_ENGINE_KEY")
    command = ["python", "-m", SERVER]
    command += server_arguments(settings, untied_copy(source, folder / "model"), "http://127.0.0.1:8000")
    print(" ".join(f"{name}={value}" for name, value in variables.items()), shlex.join(command))


if __name__ == "__main__":
    main()
