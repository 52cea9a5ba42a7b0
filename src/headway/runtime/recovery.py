"""After a stop or a kill: train again what no checkpoint holds, then put everything in flight back in line."""

from collections.abc import Callable

from headway.ledger import Ledger, RedoStep
from headway.protocols import Learner
from headway.runtime.batch import batch_metrics, prepare
from headway.runtime.proximal import Proximal, store_again
from headway.runtime.rollouts import Rollouts
from headway.staleness import OverBound
from headway.types import Group


def recover(
    ledger: Ledger,
    learner: Learner,
    rollouts: Rollouts,
    proximal: Proximal,
    *,
    max_staleness: int,
    guarded_bound: int,
    over_bound: OverBound,
    groups_per_step: int,
    log: Callable[[dict], None],
    say: Callable[[str], None],
) -> None:
    """Redo committed steps from their stored batches, proximal log-probs included, then restore the rollouts.

    The learner is deterministic, so on the same machine the redone versions have the bits they had before the kill,
    and the versions that stored responses carry keep their meaning. `guarded_bound`: what the guard had lowered the
    bound to at the checkpoint; redone steps may lower it further, and rollouts go on with what it came to. Raises
    LedgerError when a response is gone.
    """
    recovery = ledger.recover(learner.policy_version - 1)
    proximal.watcher.restored(recovery, rollouts.prompt)
    if recovery.redo:
        say(f"training {len(recovery.redo)} steps again that were committed after the last checkpoint")
    for step in recovery.redo:
        prepared = prepare(
            _groups(step, rollouts),
            step=step.step,
            policy_version=step.policy_version,
            max_staleness=max_staleness,
            over_bound=over_bound,
        )
        learner.accumulate(prepared.batch)
        ledger.store_again(store_again(proximal.source.before_step(step.policy_version)))
        report = learner.step()
        guarded_bound = int(report.metrics.get("guard_max_staleness", guarded_bound))
        learned = {**report.metrics, **report.profiles, **proximal.source.after_step(prepared.batch, report)}
        log(
            {
                "kind": "step",
                "step": step.step,
                "policy_version": step.policy_version,
                "redone": True,
                **batch_metrics(prepared),
                **learned,
                "token_staleness": {str(age): n for age, n in sorted(prepared.token_staleness.items())},
            }
        )
    recovery = ledger.recover(learner.policy_version - 1)  # once more: boundaries may have scored what is in flight
    ledger.audit(max_staleness=max_staleness).require()
    rollouts.restore(
        recovery,
        num_taken=learner.policy_version * groups_per_step,
        policy_version=learner.policy_version,
    )
    rollouts.tighten(guarded_bound)


def _groups(step: RedoStep, rollouts: Rollouts) -> list[Group]:
    return [
        Group(group_id, rollouts.prompt(group_id), responses)
        for group_id, responses in zip(step.group_ids, step.responses, strict=True)
    ]
