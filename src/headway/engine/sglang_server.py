"""Starting an SGLang server of its own Python environment, or joining one; not yet run against a real one."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from headway.engine.gpus import num_gpus, visible_gpus
from headway.engine.hosting import JoinedServer, ServerProcess, free_port, start_server, wait_healthy
from headway.engine.messages import EngineSettings
from headway.engine.sglang import SglangEngine
from headway.engine.weight_files import expected_tensors, untied_copy


def start_sglang(
    settings: EngineSettings,
    name: str,
    log_path: Path,
    *,
    python: str,
    server_args: Sequence[str] = (),
    start_timeout_s: float = 600.0,
    timeout_s: float = 60.0,
) -> ServerProcess:
    """Start `python -m sglang.launch_server`; blocking. Raises RuntimeError with the tail of its log."""
    place = log_path.with_suffix("")
    model, key, port = untied_copy(Path(settings.config), place / "model"), secrets.token_hex(16), free_port()
    file = place / "server.yaml"
    # In a file of our own: a key on the command line could be read by everyone on the machine.
    file.touch(mode=0o600)
    file.write_text(json.dumps(server_settings(settings, model, port) | {"api-key": key}))
    url = f"http://127.0.0.1:{port}"
    process = start_server(
        [python, "-m", "sglang.launch_server", "--config", str(file), *server_args],
        variables={
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(settings.num_threads),
            **visible_gpus(settings.device),
        },
        url=url,
        log_path=log_path,
        name=name,
        timeout_s=start_timeout_s,
    )
    options = client_options(settings, name, timeout_s)
    client = SglangEngine(url, key=key, place=place, num_ranks=num_gpus(server_args), **options)
    return ServerProcess(process, client, log_path)


def join_sglang(
    settings: EngineSettings,
    name: str,
    log_path: Path,
    *,
    url: str,
    key: str,
    start_timeout_s: float = 60.0,
    timeout_s: float = 60.0,
) -> JoinedServer:
    """A server that runs already; blocking. Raises RuntimeError."""
    if not wait_healthy(url, start_timeout_s):
        raise RuntimeError(f"engine {name!r}: no healthy SGLang server at {url} within {start_timeout_s:g} s")
    place = log_path.with_suffix("")
    place.mkdir(parents=True, exist_ok=True)
    return JoinedServer(SglangEngine(url, key=key, place=place, **client_options(settings, name, timeout_s)))


def client_options(settings: EngineSettings, name: str, timeout_s: float) -> dict[str, Any]:
    config, model = AutoConfig.from_pretrained(settings.config), Path(settings.config)
    return {
        "name": name,
        "on_update": settings.on_update,
        "model": model,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "max_slots": settings.max_slots,
        "max_length": settings.max_length,
        "expected": expected_tensors(model),
        "record_logprobs": settings.record_logprobs,
        "dtype": settings.dtype,
        "timeout_s": timeout_s,
    }


def server_settings(settings: EngineSettings, model: Path, port: int) -> dict[str, Any]:
    """The documented server arguments, as a configuration file (JSON is YAML)."""
    return {
        "model-path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],  # which GPU: see `visible_gpus`
        "context-length": settings.max_length,
        "max-running-requests": settings.max_slots,
        "skip-tokenizer-init": True,
        "enable-deterministic-inference": True,
        "enable-return-routed-experts": settings.record_routing,
    }
