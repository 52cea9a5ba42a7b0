"""The only builder: reads the settings and hands every component its scalars and collaborators."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from headway import ledger_file
from headway.accounts import audit_file
from headway.algorithms import find_distillation
from headway.cache import CacheKind
from headway.config import RunConfig
from headway.engine.conformance import TOLERANCE, Conformance
from headway.engine.messages import EngineSettings
from headway.ledger import Ledger
from headway.report.jsonl import JsonlSink, read_records
from headway.report.terminal import elapsed_s, summary
from headway.runtime.channels import build_channel
from headway.runtime.checks import check, check_losses, entropy_notice
from headway.runtime.devices import pick_device, pick_dtype
from headway.runtime.environments import play_elsewhere
from headway.runtime.evaluation import evaluate
from headway.runtime.group import check_ranks
from headway.runtime.head import settle_head
from headway.runtime.heartbeat import Heartbeat
from headway.runtime.launch import check_engine, conformance_every, launcher
from headway.runtime.learners import open_learner
from headway.runtime.local import EnginePool
from headway.runtime.loop import Loop, Record
from headway.runtime.proximal import Forward, Watcher, build_proximal
from headway.runtime.ranks import RankedLearner
from headway.runtime.recovery import recover
from headway.runtime.reporting import check_sinks, open_sinks, open_timeline
from headway.runtime.rollouts import EpisodeSettings, Rollouts
from headway.runtime.run_folder import RunFolder
from headway.runtime.scoring import TeacherStage
from headway.runtime.signal import Signal
from headway.runtime.site import HERE, Site, models_for_all, open_site
from headway.runtime.stopping import run_loop
from headway.runtime.task import Task, open_task
from headway.runtime.teachers import build_teacher_stage
from headway.runtime.waits import Waits
from headway.staleness import Admission, ExactLag
from headway.training.guard import explain, stored_bound
from headway.training.learner import TorchLearner
from headway.types import Sampling

Say = Callable[[str], None]
Log = Callable[[Record], None]


def run_to_end(folder: RunFolder, config: RunConfig, *, log: Log, say: Say) -> tuple[Table, bool]:
    """Start or continue the run in a folder and take it to its end: the table it closes with, and if it adds up."""
    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(folder.lock())
        folder.sweep()
        check_losses(config)
        check_engine(config)
        check_ranks(config)
        check_sinks(config)
        task = open_task(config, say=say)
        check(config, task)
        if notice := entropy_notice(config):
            say(notice)
        say(f"starting {config.engines.num_engines} {config.engine} engine(s)")
        config = settle_head(config, folder, task.model, say=say)
        site = open_site(config, stack, say=say)
        task = models_for_all(config, task, folder)
        learner = build_learner(config, folder, task, stack, site)
        timeline = stack.enter_context(closing(open_timeline(config, folder)))
        signal, waits = Signal(), Waits(limit_s=config.wait_limit_s, say=say, waited=timeline.waited)
        engines = build_engines(config, folder.checkpoint(0), folder.logs, site, signal=signal, say=say)
        device = pick_device(config.learner.device)
        forward = Forward(device, pick_dtype(config.model.dtype, device))
        proximal = build_proximal(config, folder, learner, engines, forward, site, signal=signal, say=say, stack=stack)
        # Version 0 too: engines read the architecture from it, and a recorded run replays from it.
        folder.save_checkpoint(learner.policy_version, partial(proximal.save, learner))
        task = play_elsewhere(config, task, folder, site, stack, say=say)
        recorded = list(read_records(folder.metrics_path))
        sink = stack.enter_context(closing(JsonlSink(folder.metrics_path, resume_at=learner.policy_version)))
        sinks = stack.enter_context(closing(open_sinks(config, folder, recorded, say=say)))
        ledger = stack.enter_context(closing(open_ledger(config, folder)))
        channel = stack.enter_context(closing(build_channel(config, folder, site.host, say=say)))

        def log_everywhere(record: Record) -> None:
            for take in (sink.log, sinks.log, log):
                take(record)
            if record["kind"] == "step" and (warning := explain(record)):
                say(f"step {record['step'] + 1}: {warning}")

        stage = build_teacher_stage(config, task, folder.logs, site, waits=waits, say=say)
        rollouts = build_rollouts(config, task, engines, ledger, proximal.watcher, stage, signal=signal, waits=waits)
        recover(
            ledger,
            learner,
            rollouts,
            proximal,
            max_staleness=config.max_staleness,
            guarded_bound=stored_bound(folder.checkpoint(learner.policy_version), config.max_staleness),
            over_bound=config.over_bound,
            groups_per_step=config.groups_per_step,
            log=log_everywhere,
            say=say,
        )
        loop = build_loop(config)(
            rollouts=rollouts,
            engines=engines,
            learner=learner,
            proximal=proximal,
            channel=channel,
            ledger=ledger,
            folder=folder,
            waits=waits,
            timeline=timeline,
            conformance=build_conformance(config, task, learner),
            evaluate=build_evaluator(config, task, engines),
            log=log_everywhere,
            evaluated={(r["split"], r["policy_version"]) for r in recorded if r["kind"] == "evaluation"},
        )
        # Half of what would strike the innocent: their clocks run on while one call holds everybody up.
        held_s = min(config.rollout.episode_timeout_s, config.engines.update_timeout_s) / 2
        heartbeat = Heartbeat(report_s=config.wait_limit_s, limit_s=held_s, say=say)
        run_loop(loop, heartbeat, engines, stage, say=say)
    audit = audit_file(folder.ledger_path, max_staleness=config.max_staleness)
    seconds = elapsed_s(recorded) + time.monotonic() - begun
    return summary(list(read_records(folder.metrics_path)), audit, seconds=seconds), audit.ok


def build_loop(config: RunConfig) -> Callable[..., Loop]:
    """The loop with its settings; its collaborators are yet to be given."""
    return partial(
        Loop,
        num_steps=config.num_steps,
        max_staleness=config.max_staleness,
        over_bound=config.over_bound,
        # There is one version at a time in an exact lag, and the gate opens for all at once.
        update_together=config.exact_lag or config.proximal == "exact_interrupt",
        evaluate_every=config.evaluation.every,
        evaluation_size=config.evaluation.size,
        test_size=config.evaluation.test_size,
        checkpoint_every=config.checkpoint.every,
        keep_checkpoints=config.checkpoint.keep,
        record=config.record,
    )


def build_learner(
    config: RunConfig, folder: RunFolder, task: Task, stack: ExitStack, site: Site
) -> TorchLearner | RankedLearner:
    """The learner at the newest checkpoint of the folder, or with the task's first weights."""
    versions = folder.checkpoint_versions()
    if versions:
        return open_learner(config, folder, folder.verify_checkpoint(versions[-1]), stack, site)
    return open_learner(config, folder, task.model, stack, site, tokenizer=task.tokenizer)


def open_ledger(config: RunConfig, folder: RunFolder) -> Ledger:
    return Ledger(folder.ledger_path, group_size=config.group_size, create=not ledger_file.exists(folder.ledger_path))


def build_engines(
    config: RunConfig, architecture: Path, logs: Path, site: Site = HERE, *, signal: Signal, say: Say
) -> EnginePool:
    engines = config.engines
    device = pick_device(engines.device)
    dtype = str(pick_dtype(config.model.dtype, device)).removeprefix("torch.")
    settings = EngineSettings(
        config=str(architecture),
        max_slots=engines.num_slots,
        max_length=engines.max_length,
        device=device,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        num_threads=engines.num_threads,
        on_update=engines.on_update,
        record_logprobs=engines.logprobs,
        record_entropy=engines.logprobs,
        record_routing=config.routing_replay,
        round_weights=engines.round_weights,
    )
    return EnginePool(
        launcher(config, settings, site),
        num_engines=engines.num_engines,
        logs=logs,
        signal=signal,
        num_slots=engines.num_slots,
        max_restarts=engines.max_restarts,
        patience_s=engines.update_patience_s,
        stall_s=engines.stall_s,
        say=say,
    )


def build_conformance(config: RunConfig, task: Task, learner: TorchLearner | RankedLearner) -> Conformance:
    dtype = str(pick_dtype(config.model.dtype, pick_device(config.engines.device))).removeprefix("torch.")
    num_prompts = min(8, task.environment.size("validation"))
    prompts = [task.environment.prompt("validation", index).token_ids for index in range(num_prompts)]
    # Rounded weights are meant to differ: there is nothing to hold them to.
    rounded = config.engines.round_weights != "none"
    return Conformance(
        prompts,
        score=partial(learner.next_logprobs, prompts),
        every=conformance_every(config),
        tolerance=math.inf if rounded else config.engines.conformance_tolerance or TOLERANCE[dtype],
    )


def episode_settings(config: RunConfig, task: Task) -> EpisodeSettings:
    sampling = config.sampling
    return EpisodeSettings(
        sampling=Sampling(
            max_tokens=sampling.max_response_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            num_draws=_draws_beside(config),
            num_top=_top_beside(config),
            stop_token_ids=tuple(task.environment.stop_token_ids),
            record_routing=config.routing_replay,
        ),
        group_size=config.group_size,
        run_seed=config.seed,
        max_response_tokens=sampling.max_response_tokens,
        max_turns=sampling.max_turns,
        attempts=config.rollout.attempts,
        episode_timeout_s=config.rollout.episode_timeout_s,
    )


def _draws_beside(config: RunConfig) -> int:
    """Extra draws that the engine makes at each token for a teacher to score."""
    distill = config.distill
    return distill.num_draws - 1 if distill.teacher and cache_of(distill.method) == "draws" else 0


def _top_beside(config: RunConfig) -> int:
    """Most likely ids that the engine reports at each token, for whoever needs the most of them."""
    distill = config.distill
    cached = distill.top_k if distill.teacher and cache_of(distill.method) == "student_topk" else 0
    return max(cached, config.behavior_entropy_top if config.behavior_entropy == "topk_lower_bound" else 0)


def cache_of(method: str) -> CacheKind:
    return find_distillation(method).cache


def build_rollouts(
    config: RunConfig,
    task: Task,
    engines: EnginePool,
    ledger: Ledger,
    watcher: Watcher,
    stage: TeacherStage | None,
    *,
    signal: Signal,
    waits: Waits,
) -> Rollouts:
    return Rollouts(
        environment=task.environment,
        engines=engines,
        ledger=ledger,
        admission=build_admission(config),
        signal=signal,
        waits=waits,
        settings=episode_settings(config, task),
        decode=task.decode,
        total_groups=config.num_steps * config.groups_per_step,
        watcher=watcher,
        teacher_stage=stage,
    )


def build_admission(config: RunConfig) -> Admission:
    if config.exact_lag:
        return ExactLag(lag=config.max_staleness, groups_per_step=config.groups_per_step)
    return Admission(
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        over_bound=config.over_bound,
        max_ready_batches=config.rollout.max_ready_batches or None,
    )


def build_evaluator(config: RunConfig, task: Task, engines: EnginePool) -> Any:
    return partial(
        evaluate,
        environment=task.environment,
        engines=engines,
        settings=episode_settings(config, task),
        decode=task.decode,
    )
