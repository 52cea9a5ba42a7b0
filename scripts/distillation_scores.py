"""Measures of a distillation run that need the whole vocabulary or many gradients; for study_distillation.py."""

import statistics
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headway.algorithms import compute_distillation_loss
from headway.engine.torch_engine import TorchEngine
from headway.models.loading import named_weights
from headway.models.policy import response_gathered_logprobs
from headway.protocols import Environment, SupervisedEnvironment
from headway.training.batching import Rows, collate
from headway.types import Batch, Ints, Sampling

ROWS = 8
"""In one forward pass: their log-probs over the whole vocabulary are held in float64."""


@torch.inference_mode()
def exact_kl(
    student: PreTrainedModel, teacher: PreTrainedModel, environment: Environment, *, num_prompts: int, max_tokens: int
) -> tuple[float, float]:
    """(KL(πθ‖q), KL(q‖πθ)) over the whole vocabulary, nats a token, where the student itself goes.

    States are those of one sampled answer of at most `max_tokens` to each of the first validation prompts.
    """
    prompts = [environment.prompt("validation", i).token_ids for i in range(num_prompts)]
    engine = TorchEngine(student.config, max_slots=64, max_length=max(map(len, prompts)) + max_tokens)
    engine.load(named_weights(student), 0)
    stops = tuple(environment.stop_token_ids)
    answers = engine.generate(prompts, Sampling(max_tokens=max_tokens, stop_token_ids=stops))
    found: list[Tensor] = []
    for start in range(0, num_prompts, ROWS):
        chosen = slice(start, start + ROWS)
        ids, states = _lay_out(prompts[chosen], [answer.token_ids for (answer,) in answers[chosen]])
        p, q = (model(ids).logits[states].double().log_softmax(-1) for model in (student, teacher))
        found.append(torch.stack([(p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)]))
    reverse, forward = torch.cat(found, 1).mean(1).tolist()
    return reverse, forward


@torch.inference_mode()
def accuracy(student: PreTrainedModel, environment: SupervisedEnvironment, *, num_prompts: int) -> float:
    """Share of the first validation prompts to which the likeliest tokens are the right answer."""
    examples = environment.examples("validation")[:num_prompts]
    ids, states = _lay_out(*zip(*examples, strict=True))
    right = student(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    return float((right | ~states[:, :-1]).all(1).float().mean())


def _lay_out(prompts: Sequence[Ints], answers: Sequence[Ints]) -> tuple[Tensor, Tensor]:
    """Rows `[B, S]` padded on the right, where nothing before it looks, and the states that predict the answers."""
    rows = [torch.from_numpy(np.concatenate(pair).astype(np.int64)) for pair in zip(prompts, answers, strict=True)]
    ids = pad_sequence(rows, batch_first=True)
    states = torch.zeros_like(ids, dtype=torch.bool)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        states[number, len(prompt) - 1 : len(row) - 1] = True
    return ids, states


def gradient_variance(model: PreTrainedModel, batch: Batch, method: str, widths: Sequence[int]) -> dict[int, float]:
    """m to the variance of the gradient over draws: mean squared distance of the gradient of m draws to that of all.

    `batch` holds a multiple of every m at each position; disjoint sets of m draws stand for independent ones. Raises
    ValueError where they do not come out even.
    """
    rows = collate(batch, pad_id=0, cache="draws")
    assert rows.cached_ids is not None
    most = rows.cached_ids.shape[-1]
    whole = _gradient(model, rows, method, slice(0, most))
    found = {}
    for m in widths:
        if most % m:
            raise ValueError(f"{most} draws at a position make no whole number of sets of {m}")
        parts = (_gradient(model, rows, method, slice(start, start + m)) for start in range(0, most, m))
        distances = [float((part - whole).square().sum()) for part in parts]
        # The parts average to the whole, which takes m/most of the variance away.
        found[m] = statistics.mean(distances) / (1 - m / most)
    return found


def _gradient(model: PreTrainedModel, rows: Rows, method: str, columns: slice) -> Tensor:
    """Of the loss on these draws, `[number of parameters]`."""
    assert rows.cached_ids is not None and rows.teacher_logprobs is not None and rows.rollout_logprobs is not None
    attention = torch.arange(rows.input_ids.shape[1]) < rows.lengths.unsqueeze(1)
    student, _ = response_gathered_logprobs(model, rows.input_ids, attention, rows.mask, rows.cached_ids[..., columns])
    loss, _ = compute_distillation_loss(
        method,
        student_logprobs=student,
        teacher_logprobs=rows.teacher_logprobs[..., columns],
        rollout_logprobs=rows.rollout_logprobs[..., columns],
        mask=rows.mask,
    )
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
