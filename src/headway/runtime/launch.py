"""Which engine a run's settings ask for, and how one is started or joined."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from headway.algorithms import find_algorithm
from headway.config import ConfigError, EngineConfig, RunConfig
from headway.engine.hosting import Host, Launch
from headway.engine.http import Http
from headway.engine.messages import EngineSettings
from headway.engine.process import start_engine
from headway.engine.sglang_server import join_sglang, start_sglang
from headway.engine.vllm_server import join_vllm, start_vllm
from headway.runtime.channels import check_channel
from headway.runtime.placing import engine_devices
from headway.runtime.site import HERE, Site, check_site

SERVERS: dict[str, tuple[Callable[..., Host], Callable[..., Host]]] = {
    "vllm": (start_vllm, join_vllm),
    "sglang": (start_sglang, join_sglang),
}
"""Engines behind HTTP: how one is started, how one is joined."""


def launcher(config: RunConfig, settings: EngineSettings, site: Site = HERE) -> Launch:
    """What starts (or joins) one engine of this run, each on its device."""
    engines = config.engines
    each = {f"engine-{i}": replace(settings, device=device) for i, device in enumerate(engine_devices(config))}
    limits: dict[str, float] = {"start_timeout_s": engines.start_timeout_s, "timeout_s": engines.update_timeout_s}
    if config.engine == "torch":
        return lambda name, log_path: start_engine(each[name], name, log_path, token=None, spawn=site.spawn, **limits)
    start, join = SERVERS[config.engine]
    if engines.url:
        key = os.environ.get(engines.api_key_env, "")
        return lambda name, log_path: join(each[name], name, log_path, url=engines.url, key=key, **limits)
    python = python_of(engines)
    return lambda name, log_path: start(
        each[name], name, log_path, python=python, server_args=engines.server_args, **limits
    )


def python_of(engines: EngineConfig) -> str:
    """The interpreter that servers are started with, as an absolute path; links stay, for a venv is known by one."""
    return str(Path(engines.python).expanduser().absolute()) if engines.python else sys.executable


def check_engine(config: RunConfig) -> None:
    """Refuse settings that no engine of the kind can serve, before anything starts. Raises ConfigError."""
    check_channel(config)
    check_site(config)
    engine_devices(config)
    engines = config.engines
    if config.engine == "torch":
        for name in ("url", "python", "server_args"):
            if getattr(engines, name):
                raise ConfigError(f'engines.{name} is for engine = "vllm" or "sglang"; the built-in engine has none')
        return
    if engines.round_weights != "none":
        raise ConfigError(
            f'engine = "{config.engine}" serves the weights as they are, but engines.round_weights = '
            f'"{engines.round_weights}"; set it to "none", or engine to "torch"'
        )
    if engines.url and engines.num_engines > 1:
        raise ConfigError(f"engines.url joins one server, but engines.num_engines = {engines.num_engines}; set it to 1")
    _check_url(engines.url)
    if engines.url and not os.environ.get(engines.api_key_env):
        raise ConfigError(
            f"engines.url = {engines.url!r} needs the server's key in the environment variable {engines.api_key_env}"
        )
    python = Path(python_of(engines))
    if not engines.url and not (python.is_file() and os.access(python, os.X_OK)):  # folders are "executable" too
        raise ConfigError(
            f"engines.python = {engines.python!r} is no Python interpreter; name that of an environment, such as "
            "vllm-env/bin/python"
        )
    if config.engine == "vllm" and config.routing_replay:
        raise ConfigError('engine = "vllm" does not report experts yet; set routing_replay = false, or use torch')
    if config.engine == "sglang":
        _check_sglang(config)


def _check_url(url: str) -> None:
    try:
        Http(url or "http://127.0.0.1")
    except ValueError as error:
        raise ConfigError(f"engines.url: {error}") from error


def _check_sglang(config: RunConfig) -> None:
    needs = find_algorithm(config.algorithm).needs_for(config.algorithm_params)
    if "behavior_entropy" in needs and config.behavior_entropy == "engine":
        raise ConfigError(
            f"algorithm {config.algorithm!r} needs the entropy of the policy that sampled, which engine = "
            '"sglang" does not report; set behavior_entropy to "topk_lower_bound" or "learner"'
        )
    if config.sampling.top_p < 1 or config.sampling.top_k:
        raise ConfigError(
            'engine = "sglang" reports log-probs of the whole vocabulary, not of a truncated one; '
            "set sampling.top_p = 1 and sampling.top_k = 0"
        )
    if config.engines.on_update == "keep":
        raise ConfigError(
            'engine = "sglang" cannot say exactly which token follows an update when caches are kept; '
            'set engines.on_update to "recompute" or "interrupt"'
        )


def conformance_every(config: RunConfig) -> int:
    """Updates between checks of log-probs; `auto` resolved."""
    if config.engines.conformance_every == "auto":
        return 0 if config.engine == "torch" else 1
    return config.engines.conformance_every
