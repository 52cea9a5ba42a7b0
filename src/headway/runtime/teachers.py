"""From settings to a teacher: what must hold before it may teach, and the building of it."""

import os
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoConfig

from headway.algorithms import compute_distillation_loss, find_distillation
from headway.config import ConfigError, RunConfig
from headway.config_sections import SERVERS
from headway.engine.architecture import Architecture
from headway.models.loading import load_tokenizer, locate
from headway.protocols import RequestRefused, Teacher
from headway.runtime.devices import device_problem, pick_device, pick_dtype
from headway.runtime.scoring import TeacherStage
from headway.runtime.site import HERE, Site
from headway.runtime.task import Task, longest_prompt
from headway.runtime.waits import Waits
from headway.teacher.http import BadAnswer, HttpTeacher, check_server
from headway.teacher.local import LocalTeacher
from headway.teacher.messages import TeacherSettings
from headway.teacher.vocabulary import check_vocabulary

Say = Callable[[str], None]

KEY_VARIABLE = "HEADWAY_TEACHER_KEY"
"""Environment variable with the key of an HTTP teacher: settings are written to the run folder, a key is not."""


_LOCAL_KNOB = "distill.num_threads, num_draws or top_k"


def check_distillation(config: RunConfig) -> None:
    """Refuse a distillation that its settings cannot feed; needs no model. Raises ConfigError."""
    distill = config.distill
    try:
        method = find_distillation(distill.method)
        method.resolve(distill.params)
        _try_out(distill.method, distill.params)
    except ValueError as error:
        raise ConfigError(f"distill.method or distill.params: {error}") from error
    if "rollout_logprobs" in method.needs and not config.engines.logprobs:
        raise ConfigError(
            f"distill.method = {distill.method!r} needs log-probs of the policy that sampled, but engines.logprobs = "
            "false; set it to true"
        )
    if "proximal_logprobs" in method.needs and config.proximal != "train_start":
        raise ConfigError(
            f'distill.method = "{distill.method}" decouples at the policy that a step starts with, but proximal = '
            f'"{config.proximal}"; set proximal = "train_start", or distill.method = "mc_recomputed"'
        )
    if config.engine == "sglang" and method.cache == "draws" and distill.num_draws > 1:
        raise ConfigError(
            f'engine = "sglang" makes no extra draws, but distill.num_draws = {distill.num_draws}; set it to 1, or '
            'engine to "torch" or "vllm"'
        )
    if distill.is_remote:
        _check_remote(config, method.cache)
    elif "://" in distill.teacher:
        raise ConfigError(f"distill.teacher = {distill.teacher!r} begins with neither of {', '.join(SERVERS)}")
    elif config.runtime == "local" and (problem := device_problem(distill.device)):
        raise ConfigError(f'distill.device = "{distill.device}": {problem}')


def _try_out(method: str, params: Mapping[str, Any]) -> None:
    """Run the loss once on two fresh draws (ratio 1), of which the teacher likes one more than the student, one less.

    Both must have a gradient, or nothing would ever be learned. Raises ValueError.
    """
    fresh = torch.full((1, 1, 2), -3.0)
    student = fresh.clone().requires_grad_()
    loss, _ = compute_distillation_loss(
        method,
        student_logprobs=student,
        teacher_logprobs=fresh + torch.tensor([2.0, -2.0]),
        rollout_logprobs=fresh,
        mask=torch.ones(1, 1),
        **params,
    )
    (gradient,) = torch.autograd.grad(loss, student)
    if not bool(gradient.all()):
        raise ValueError(
            f"with {dict(params)} {method} would not even learn from draws that its own student just made: cap must be "
            "at least 1"
        )


def _check_remote(config: RunConfig, cache: str) -> None:
    """An OpenAI-compatible server knows the tokens themselves and its own top, nothing else."""
    distill = config.distill
    _check_url(distill.teacher)
    if cache == "student_topk" or (cache == "draws" and distill.num_draws > 1):
        raise ConfigError(
            f"distill.teacher = {distill.teacher!r} is a server, which returns no log-probs of chosen ids, as "
            f"{distill.method!r} with distill.num_draws = {distill.num_draws} needs; set distill.num_draws = 1 with a "
            'method on draws, or distill.method = "forward_kl_teacher_topk", or name a local model as the teacher'
        )
    if distill.temperature != 1:
        raise ConfigError("distill.temperature must be 1 with a server as the teacher: its prompt log-probs are")
    for name in ("served_model", "tokenizer"):
        if not getattr(distill, name):
            raise ConfigError(f"distill.{name} is empty, but a server as the teacher needs it")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:  # reading the port refuses one that is no number
            raise ValueError("it names no host")
    except ValueError as error:
        raise ConfigError(f"distill.teacher = {url!r}: {error}; write http://HOST:PORT") from error


def check_teacher(config: RunConfig, task: Task) -> None:
    """Refuse a teacher whose ids mean other tokens, or that does not answer. Raises ConfigError, OtherVocabulary."""
    distill = config.distill
    student_rows = AutoConfig.from_pretrained(task.model).vocab_size
    if distill.top_k > student_rows and find_distillation(distill.method).cache != "draws":
        raise ConfigError(f"distill.top_k = {distill.top_k} exceeds the vocabulary; set it to at most {student_rows}")
    try:
        # The tokenizer first: where there is no such model, its error names the mend.
        tokenizer = load_tokenizer(distill.tokenizer if distill.is_remote else task.teacher)
        teacher = None if distill.is_remote else AutoConfig.from_pretrained(locate(task.teacher))
        teacher_rows = Architecture(teacher).vocab_size if teacher is not None else None
    except (ValueError, OSError) as error:
        raise ConfigError(f"distill.teacher = {distill.teacher!r}: {error}") from error
    check_vocabulary(
        task.tokenizer.get_vocab(), tokenizer.get_vocab(), teacher_rows=teacher_rows, teacher_name=distill.teacher
    )
    if teacher is not None:
        _check_reach(config, task, teacher.max_position_embeddings)
    else:
        server = build_http_teacher(config, student_rows, say=lambda message: None)
        prompt = task.environment.prompt("train", 0).token_ids.tolist()
        try:
            check_server(server, prompt, num_top(config), decode=lambda id: task.tokenizer.decode([id]))
        except (OSError, HTTPException, BadAnswer, RequestRefused) as error:
            raise ConfigError(f"distill.teacher = {distill.teacher!r}: the server does not serve: {error}") from error


def _check_reach(config: RunConfig, task: Task, num_positions: int) -> None:
    """Refuse a teacher that the longest responses do not fit: their groups would be dropped one by one."""
    longest, most = longest_prompt(task.environment, "train"), config.sampling.max_response_tokens
    if longest + most > num_positions:
        raise ConfigError(
            f"distill.teacher = {config.distill.teacher!r} has {num_positions} positions, but a prompt of {longest} "
            f"tokens and sampling.max_response_tokens = {most} may need {longest + most}; lower that or take another"
        )


def num_top(config: RunConfig) -> int:
    """How many ids the teacher itself is to name."""
    return config.distill.top_k if find_distillation(config.distill.method).cache == "teacher_topk" else 0


def cache_width(config: RunConfig) -> int:
    """Log-probs that a position travels with: m draws, or the token itself and k ids."""
    distill = config.distill
    return distill.num_draws if find_distillation(distill.method).cache == "draws" else 1 + distill.top_k


def build_teacher_stage(
    config: RunConfig, task: Task, logs: Path, site: Site = HERE, *, waits: Waits, say: Say
) -> TeacherStage | None:
    """The stage that takes episodes to the teacher; None for a run without one."""
    if not config.distill.teacher:
        return None
    kind = find_distillation(config.distill.method).cache
    student_rows = AutoConfig.from_pretrained(task.model).vocab_size
    return TeacherStage(
        build_teacher(config, task, logs, student_rows, site, say=say),
        kind=kind,
        num_top=num_top(config),
        width=cache_width(config),
        vocab_size=student_rows,
        latency_s=config.distill.latency_s,
        knob="distill.top_k, or a faster server" if config.distill.is_remote else _LOCAL_KNOB,
        waits=waits,
    )


def build_teacher(
    config: RunConfig, task: Task, logs: Path, student_rows: int, site: Site = HERE, *, say: Say
) -> Teacher:
    """A process of this run, or a client of a server."""
    distill = config.distill
    if distill.is_remote:
        return build_http_teacher(config, student_rows, say=say)
    device = pick_device(distill.device)
    settings = TeacherSettings(
        model=task.teacher,
        student_vocab_size=student_rows,
        temperature=distill.temperature,
        device=device,
        dtype="bfloat16" if pick_dtype(config.model.dtype, device) == torch.bfloat16 else "float32",
        num_threads=distill.num_threads,
        batch_tokens=distill.batch_tokens,
    )
    return LocalTeacher(
        settings,
        log_path=logs / "teacher.log",
        timeout_s=distill.timeout_s,
        max_failures=distill.max_failures,
        say=say,
        spawn=site.spawn,
    )


def build_http_teacher(config: RunConfig, student_rows: int, *, say: Say) -> HttpTeacher:
    distill = config.distill
    return HttpTeacher(
        distill.teacher,
        model=distill.served_model,
        key=os.environ.get(KEY_VARIABLE, ""),
        vocab_size=student_rows,
        timeout_s=distill.timeout_s,
        max_failures=distill.max_failures,
        say=say,
    )
