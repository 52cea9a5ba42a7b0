"""Builds a learner from a run's settings: what it minimizes, where it computes, on how many ranks."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.algorithms.proximal import AT_LOSS_TIME
from headway.config import RunConfig
from headway.models.loading import load_causal_lm, load_tokenizer, save_causal_lm
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.group import check_ranks, rank_device, shard
from headway.runtime.head import tiles_of
from headway.runtime.ranks import Followers, RankedLearner
from headway.runtime.reporting import build_profiles
from headway.runtime.run_folder import RunFolder, RunFolderError
from headway.runtime.site import HERE, Site
from headway.training.guard import Guard, Limits
from headway.training.learner import TorchLearner
from headway.training.objectives import DistillationObjective, Objective, PolicyObjective, WeightedSum
from headway.training.ranks import OneRank, Ranks
from headway.training.schedule import learning_rate


def open_learner(
    config: RunConfig,
    folder: RunFolder,
    source: str | Path,
    stack: ExitStack,
    site: Site = HERE,
    *,
    tokenizer: Any = None,
) -> TorchLearner | RankedLearner:
    """`load_learner` on as many ranks as the config says; `stack` ends the others."""
    if config.learner.num_ranks == 1:
        return load_learner(config, source, tokenizer=tokenizer)
    followers = Followers(config, source, folder, stack, site)
    learner = followers.meet(lambda: load_learner(config, source, tokenizer=tokenizer, sharded=True))
    return RankedLearner(learner, followers)


def load_learner(
    config: RunConfig, source: str | Path, *, tokenizer: Any = None, sharded: bool = False
) -> TorchLearner:
    """A learner with the weights of `source`, and with its optimizer's state where that is a checkpoint.

    `sharded`: this process's part of one, in a process group of all its ranks.
    """
    torch.set_num_threads(config.learner.num_threads)
    tokenizer = tokenizer or load_tokenizer(source)
    device = pick_device(config.learner.device)
    model = load_causal_lm(source, device=rank_device(device, dist.get_rank()) if sharded else device)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # without it transformers ignores the switch; dropout is refused by the checks
    optimizer = config.optimizer
    ranks: Ranks = shard(config, model, source) if sharded else OneRank(model)
    learner = TorchLearner(
        model,
        ranks=ranks,
        objective=build_objective(config),
        temperature=config.sampling.temperature,
        learning_rate=partial(
            learning_rate,
            peak=optimizer.peak,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            num_steps=config.num_steps,
        ),
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        gradient_cosine=config.learner.gradient_cosine,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        pad_id=0,  # never attended to, so any id will do
        autocast=pick_dtype(config.model.dtype, device),
        tiles=tiles_of(config),
        save_model=partial(save_causal_lm, ranks.whole, tokenizer),
        routing_replay=config.routing_replay,
        guard=build_guard(config),
        vcpo_lr_scale=optimizer.vcpo_lr_scale,
        profiles=build_profiles(config),
    )
    if (Path(source) / "learner.json").is_file():
        learner.load(Path(source))
    return learner


def replay_learner(
    folder: RunFolder, config: RunConfig, stack: ExitStack | None = None
) -> TorchLearner | RankedLearner:
    """The learner of a run as it was at version 0, on as many ranks as it had, which `stack` ends.

    `stack` None: on one rank, which gives the same but for rounding. Raises RunFolderError if that checkpoint is gone,
    ConfigError if this machine has too few GPUs.
    """
    first = folder.checkpoint(0)
    if not first.is_dir():
        raise RunFolderError(f"{first} is missing; a replay starts from the weights the run started from")
    if stack is None:
        return load_learner(config, first)
    check_ranks(config, here=True)
    return open_learner(config, folder, first, stack)


def build_objective(config: RunConfig) -> Objective:
    """The policy loss, the distillation loss, or their weighted sum."""
    distill = config.distill
    if not distill.teacher:
        return _policy_objective(config)
    parts: dict[str, tuple[float, Objective]] = {
        "distill": (distill.weight, DistillationObjective(distill.method, distill.params))
    }
    if config.learns_from_reward:
        parts["policy"] = distill.reward_weight, _policy_objective(config)
    return WeightedSum(parts)


def _policy_objective(config: RunConfig) -> PolicyObjective:
    return PolicyObjective(
        config.algorithm,
        config.algorithm_params,
        behavior_entropy=config.behavior_entropy,
        proximal=AT_LOSS_TIME.get(config.proximal),
    )


def build_guard(config: RunConfig) -> Guard | None:
    """What watches for signs of collapse; None when it is switched off."""
    guard = config.guard
    if guard.action == "off":
        return None
    limits = Limits(window=guard.window, cosine=guard.cosine, ess=guard.ess, k3=guard.k3, budget=guard.budget)
    return Guard(limits, action=guard.action, max_staleness=config.max_staleness)
