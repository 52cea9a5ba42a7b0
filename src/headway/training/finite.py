"""From "row 3 is NaN" to who that is, who said it, and what mends it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from headway.algorithms.inputs import NonFiniteInput
from headway.errors import HeadwayError
from headway.types import Batch

SPEAKERS = {
    "logprobs": "the policy being trained",
    "student_logprobs": "the policy being trained",
    "behavior_logprobs": "the engine",
    "behavior_entropy": "the engine (or what stands for its entropy)",
    "rollout_logprobs": "the engine",
    "proximal_logprobs": "the proximal source",
    "teacher_logprobs": "the teacher",
    "advantages": "the rewards",
}

MENDS = {
    "the policy being trained": 'a lower optimizer.lr, or model.dtype = "float32"',
    "the proximal source": "another proximal source",
    "the teacher": "another teacher or distill.method",
    "the rewards": "an environment whose rewards are finite",
}


class NonFiniteSample(HeadwayError, ArithmeticError):
    """A token of a batch has a log-prob (or entropy, or advantage) that is NaN or infinite; nothing was trained."""


@contextmanager
def in_part(part: Tensor) -> Iterator[None]:
    """Inside, rows are those of a micro-batch; `part` are their numbers in the batch."""
    try:
        yield
    except NonFiniteInput as error:
        raise error.at_row(int(part[error.index[0]])) from None


@contextmanager
def named(batch: Batch) -> Iterator[None]:
    """Raises NonFiniteSample in place of NonFiniteInput: group, member, token, who said it, the mend."""
    try:
        yield
    except NonFiniteInput as error:
        raise NonFiniteSample(describe(batch, error)) from error


def describe(batch: Batch, error: NonFiniteInput) -> str:
    """One line for a person; rows of the error are in the order of the batch."""
    row, position = error.index[:2]
    members = [(group, member) for group in batch.groups for member in range(len(group.responses))]
    group, member = members[row]
    token = position - len(group.prompt.token_ids)
    who = SPEAKERS.get(error.key, error.key)
    mend = MENDS.get(who, "another engine, or engine settings (`headway doctor --engine`)")
    return (
        f"step {batch.step}: {error.key} of group {group.group_id}, member {member}, token {token} (id "
        f"{int(group.responses[member].token_ids[token])}) is {error.value}, as {who} gave it ({error.count} such "
        "values). Nothing was trained on it, but the batch is committed: `headway resume` trains it again and stops "
        f"here again. Start a new run from the newest checkpoint (model.path) with {mend}"
    )
