"""What must hold before a run may start. Each refusal names the setting and the mend."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from headway.algorithms import ALGORITHMS, compute_loss, find_algorithm
from headway.algorithms.proximal import AT_LOSS_TIME
from headway.config import ConfigError, RunConfig
from headway.engine.architecture import Architecture
from headway.engine.vllm_server import CPU_HEAD_SIZES
from headway.errors import nearest
from headway.runtime.devices import pick_device
from headway.runtime.task import Task, longest_prompt
from headway.runtime.teachers import check_distillation, check_teacher
from headway.types import Split


def check(config: RunConfig, task: Task) -> None:
    """Refuse a run that could not work, before any process starts. Raises ConfigError."""
    _check_model(config, task)
    for split in ("train", "validation", "test"):
        _check_prompts(config, task, split)
    if config.distill.teacher:
        check_teacher(config, task)


def check_losses(config: RunConfig) -> None:
    """Refuse losses that the settings cannot feed; needs no model, so it comes first. Raises ConfigError."""
    if config.distill.teacher:
        check_distillation(config)
    if config.learns_from_reward:
        check_algorithm(config)
    elif config.proximal != "train_start":
        raise ConfigError(
            f'proximal = "{config.proximal}" serves a policy loss, and this run learns from a teacher alone'
        )
    if config.routing_replay and config.proximal not in ("train_start", *AT_LOSS_TIME):
        raise ConfigError(
            f'proximal = "{config.proximal}" scores with experts of its own choice, which routing_replay = true '
            'forbids; set proximal to "train_start", "behavior" or "loglinear"'
        )


def check_algorithm(config: RunConfig) -> None:
    """Refuse an algorithm that the settings cannot feed. Raises ConfigError."""
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {config.algorithm!r}; {nearest(config.algorithm, list(ALGORITHMS))}")
    try:
        needs = find_algorithm(config.algorithm).needs_for(config.algorithm_params)
        try_out(config.algorithm, config.algorithm_params)
    except ValueError as error:
        raise ConfigError(f"algorithm_params: {error}") from error
    if {"behavior_logprobs", "behavior_entropy"} & needs and not config.engines.logprobs:
        raise ConfigError(
            f"algorithm {config.algorithm!r} needs log-probs or entropy of the policy that sampled, but "
            "engines.logprobs = false; set it to true, or choose asympo or spo, which need none"
        )
    if config.behavior_entropy == "topk_lower_bound" and not config.engines.logprobs:
        raise ConfigError(
            'behavior_entropy = "topk_lower_bound" is made from log-probs of the engine, but engines.logprobs = false; '
            'set it to true, or behavior_entropy to "learner"'
        )
    if config.optimizer.vcpo_lr_scale and not config.engines.logprobs:
        raise ConfigError(
            "optimizer.vcpo_lr_scale is made from log-probs of the engine, but engines.logprobs = false; "
            "set that to true, or optimizer.vcpo_lr_scale to false"
        )
    if config.algorithm == "ppo_ewma" and config.proximal != "ewma":
        raise ConfigError(
            f'algorithm "ppo_ewma" clips around averaged parameters, not proximal = "{config.proximal}"; '
            'set proximal = "ewma", or choose decoupled_ppo'
        )
    if "proximal_logprobs" not in needs and config.proximal != "train_start":
        users = sorted(name for name, row in ALGORITHMS.items() if "proximal_logprobs" in row.needs)
        raise ConfigError(
            f'algorithm {config.algorithm!r} has no proximal policy, proximal = "{config.proximal}" would only cost; '
            f'leave it at "train_start", or choose one of {", ".join(users)}'
        )
    if config.group_size == 1:
        teacher = ", or learn from the teacher alone with distill.reward_weight = 0" if config.distill.teacher else ""
        raise ConfigError(f"group_size = 1 leaves no baseline, so every advantage is 0; set it to 2 or more{teacher}")
    if "whole_groups" in needs and config.over_bound == "mask":
        raise ConfigError(
            f"algorithm {config.algorithm!r} needs whole groups (its gradient sums to zero only over all members), "
            'but over_bound = "mask" takes tokens out of them; set over_bound to "wait" or "drop"'
        )


def try_out(algorithm: str, params: Mapping[str, Any]) -> None:
    """Run the loss once on two made-up responses: a value of the wrong kind shows here, not after an hour.

    They are fresh (every ratio is 1), where each algorithm is the plain policy gradient: a good response must be
    pushed up and a bad one not. Raises ValueError.
    """
    ones = torch.ones(2, 2)
    logprobs = (-3 * ones).requires_grad_()
    try:
        loss, _ = compute_loss(
            algorithm,
            logprobs=logprobs,
            behavior_logprobs=-3 * ones,
            behavior_entropy=ones,
            advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
            mask=ones,
            group=torch.zeros(2, dtype=torch.int64),
            **params,
        )
    except TypeError as error:
        raise ValueError(f"{algorithm} cannot compute with {dict(params)}: {error}") from error
    good, bad = -torch.autograd.grad(loss, logprobs)[0]
    if not all(bool(tensor.isfinite().all()) for tensor in (loss, good, bad)):
        raise ValueError(f"with {dict(params)} {algorithm} has no finite loss: a number is too large or too small")
    if not (bool((good > 0).all()) and bool((bad <= 0).all())):
        raise ValueError(
            f"with {dict(params)} {algorithm} would not even learn from data that its own policy just sampled: bounds "
            "must hold the ratio 1 (low ≤ 1 ≤ high, band ≥ 1, eps ≥ 0), caps and scales be positive"
        )


def entropy_notice(config: RunConfig) -> str | None:
    """What a run says at its start when the behavior entropy is not the exact one."""
    match config.behavior_entropy:
        case "engine":
            return None
        case "topk_lower_bound":
            what = (
                f"a lower bound from the {config.behavior_entropy_top} most likely tokens stands for the entropy of "
                "the policy that sampled, so ESTR drops every token it would drop with the exact one, and some more"
            )
        case "learner":
            what = (
                "the entropy of the policy being trained stands for that of the policy that sampled, which is up to "
                f"{config.max_staleness} versions older"
            )
    return f'behavior_entropy = "{config.behavior_entropy}": {what}; behavior_entropy_error_… in the metrics measure it'


def _check_model(config: RunConfig, task: Task) -> None:
    """The engine must know the architecture, and the learner must be able to score with its head."""
    model = AutoConfig.from_pretrained(task.model)
    if config.engine == "torch":
        try:
            num_sparse_layers = Architecture(model).num_sparse_layers
        except ValueError as error:
            raise ConfigError(f"model.path = {task.model!r}: {error}") from error
        if config.routing_replay and not num_sparse_layers:
            raise ConfigError(
                f"routing_replay = true, but model.path = {config.model.path!r} is dense and chooses no experts; "
                "set routing_replay = false, or name a mixture of experts such as tiny:moe"
            )
    elif config.engine == "vllm" and not config.engines.url and pick_device(config.engines.device) == "cpu":
        _check_head_size(config, model)
    if config.behavior_entropy == "topk_lower_bound" and config.behavior_entropy_top > model.vocab_size:
        raise ConfigError(
            f"behavior_entropy_top = {config.behavior_entropy_top} exceeds the model's vocabulary of "
            f"{model.vocab_size} tokens; set it to at most that"
        )
    if config.learner.gradient_checkpointing and getattr(model, "attention_dropout", 0.0):
        raise ConfigError("learner.gradient_checkpointing with a model that has dropout: set attention_dropout to 0")


def _check_head_size(config: RunConfig, model: Any) -> None:
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"model.path = {config.model.path!r} has attention heads of {size}, but vLLM on CPU runs "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose another model, such as tiny:0.4m-wide"
        )


def _check_prompts(config: RunConfig, task: Task, split: Split) -> None:
    """Every split in use has prompts, and they fit the engine with their answers."""
    if task.environment.size(split) < 1:
        raise ConfigError(f"task {config.task.name!r} has no {split} prompts")
    longest = longest_prompt(task.environment, split)
    needed = longest + config.sampling.max_response_tokens
    if needed > config.engines.max_length:
        raise ConfigError(
            f"a {split} prompt of {longest} tokens and sampling.max_response_tokens = "
            f"{config.sampling.max_response_tokens} do not fit engines.max_length = {config.engines.max_length}; "
            f"set it to at least {needed}"
        )
