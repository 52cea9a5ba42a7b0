"""The built-in learner: AdamW, micro-batches with global denominators, on one rank or several."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.algorithms import response_log_ratios, vcpo_lr_scale
from headway.errors import HeadwayError
from headway.models.loading import named_weights
from headway.models.tiles import EAGER, Tiles
from headway.training.batching import Rows, check_origins, check_vocabulary, collate
from headway.training.finite import named
from headway.training.guard import Guard
from headway.training.objectives import Objective, Scores, Targets
from headway.training.optimizer_state import load_optimizer, save_optimizer
from headway.training.passes import Passes, loss_of
from headway.training.ranks import OneRank, Ranks
from headway.training.routing import Layout, collate_routing
from headway.types import Batch, Floats, Ints, StepReport

MAX_SKIPPED = 5
"""Steps in a row with a non-finite gradient after which training stops."""


@dataclass(frozen=True, slots=True)
class _Accumulated:
    """Half a step: the gradient lies with the parameters."""

    batch: Batch
    metrics: Mapping[str, float]
    profiles: Mapping[str, Any]
    num_tokens: int
    seconds: float


class NonFiniteGradient(HeadwayError, ArithmeticError):
    """Step after step the gradient holds NaN or infinity; the parameters were not touched."""


class NonFiniteWeights(HeadwayError, ArithmeticError):
    """A parameter is NaN or infinite."""


class TorchLearner:
    """Trains a causal LM toward an objective; deterministic in its state and the batch.

    What every token weighs is fixed on the whole batch, so neither the micro-batch split nor padding changes the
    result, but for methods whose `scope` is the micro-batch. Where an objective needs statistics of the whole batch,
    all micro-batches are scored first, without gradient.

    On several ranks each has a learner of its own, and all make the same calls in the same order. Every rank lays out
    the whole batch and takes its share of the micro-batches; scores are put together again, so statistics and metrics
    are those of the whole batch. Metrics, guard and the model's files are rank 0's.

    Args:
        model: float32 master weights, on its device.
        ranks: `model` in its shards; None trains it here alone.
        objective: what a step minimizes.
        temperature: of the rollouts; log-probs are taken at the same one.
        learning_rate: optimizer step to rate.
        autocast: what forward passes compute in.
        tiles: how the fused head computes.
        save_model: writes model and tokenizer in Hugging Face format to a directory.
        routing_replay: take the experts the engine recorded (2510.11370); the model must be a mixture of experts.
        guard: sees every step's metrics and may scale the learning rate; saved with the state.
        vcpo_lr_scale: scale the rate of every step by the batch's effective sample size.
        profiles: what a step reports of its tokens beside metrics, from the rows and their log-probs.
    """

    def __init__(
        self,
        model: Any,
        *,
        ranks: Ranks | None = None,
        objective: Objective,
        temperature: float,
        learning_rate: Callable[[int], float],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
        gradient_cosine: bool,
        micro_batch_tokens: int,
        pad_id: int,
        autocast: torch.dtype,
        tiles: Tiles = EAGER,
        save_model: Callable[[Path], object],
        policy_version: int = 0,
        routing_replay: bool = False,
        guard: Guard | None = None,
        vcpo_lr_scale: bool = False,
        profiles: Callable[[Rows, Tensor], Mapping[str, Any]] = lambda rows, logprobs: {},
    ) -> None:
        self._ranks: Ranks = ranks or OneRank(model)
        self._leads = self._ranks.rank == 0
        self._vocab_size: int = model.config.vocab_size
        self._routing_layout = Layout.of(model) if routing_replay else None
        self._objective = objective
        self._temperature = temperature
        self._passes = Passes(
            model,
            self._ranks,
            objective,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            autocast=autocast,
            tiles=tiles,
        )
        self._learning_rate = learning_rate
        self._scales_rate = vcpo_lr_scale
        self._profiles = profiles
        self._max_grad_norm = max_grad_norm
        self._gradient_cosine = gradient_cosine
        self._num_skipped = 0
        self._pad_id = pad_id
        self._autocast = autocast
        self._save_model = save_model
        self._policy_version = policy_version
        self._accumulated: _Accumulated | None = None
        self._guard = guard
        self._parameters = self._ranks.parameters
        held = [p for p in self._parameters.values() if p.numel()]  # few rows do not reach every rank
        decayed, plain = [p for p in held if p.ndim >= 2], [p for p in held if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)
        self._previous_gradient: list[Tensor] = []

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def model(self) -> Any:
        """The policy being trained, whole; on rank 0."""
        return self._ranks.whole

    def train(self, batch: Batch) -> StepReport:
        """One optimizer step; one whose gradient is not finite changes nothing but the version.

        Raises NonFiniteGradient after `MAX_SKIPPED` of those in a row, ValueError for a batch of another version, and
        what the objective raises.
        """
        self.accumulate(batch)
        return self.step()

    def accumulate(self, batch: Batch) -> None:
        """The gradient of the whole batch; the parameters stay.

        Raises ValueError for a batch of another version, NonFiniteSample, and what the objective raises.
        """
        if batch.policy_version != self._policy_version:
            raise ValueError(f"batch of version {batch.policy_version} given to a learner at {self._policy_version}")
        begun = time.monotonic()
        check_origins(batch, temperature=self._temperature)
        rows = self._lay_out(batch)
        targets, metrics = self._objective.targets(batch, rows)
        with named(batch):
            scores, routed = self._passes.backward(rows, targets)
            found = {**metrics, **self._batch_metrics(rows, scores, targets), **routed} if self._leads else {}
        profiles = self._profiles(rows, scores.logprobs) if self._leads else {}
        numbers = {name: float(value) for name, value in found.items()}
        seconds = time.monotonic() - begun
        self._accumulated = _Accumulated(batch, numbers, profiles, int(rows.lengths.sum()), seconds)

    def _batch_metrics(self, rows: Rows, scores: Scores, targets: Targets) -> dict[str, Any]:
        """Once more over the whole batch: metrics depend on the micro-batch split only where the method does."""
        used = self._objective.in_parts(rows, scores, targets, self._passes.all_micro_batches(rows))
        loss, metrics = loss_of(self._objective, rows, scores, targets, used)
        entropy = scores.entropy[rows.mask].mean() if rows.mask.any() else 0.0
        return {"loss": loss, "entropy": entropy, **metrics, **self._rate_scale(rows, scores.logprobs)}

    def step(self) -> StepReport:
        """Move on to the next version by what was accumulated. Raises NonFiniteGradient."""
        accumulated, self._accumulated = self._accumulated, None
        if accumulated is None:
            raise RuntimeError("step without a batch: call accumulate first")
        begun, batch = time.monotonic(), accumulated.batch
        gradient_metrics = self._step(batch.step, accumulated.metrics.get("lr_scale", 1.0))
        seconds = accumulated.seconds + time.monotonic() - begun
        found = {
            **accumulated.metrics,
            **gradient_metrics,
            "train_s": seconds,
            "trained_tokens_per_s": accumulated.num_tokens / seconds,
        }
        if self._guard is not None and self._leads:
            found |= self._guard.observe(found)
        return StepReport(
            step=batch.step, policy_version=batch.policy_version, metrics=found, profiles=accumulated.profiles
        )

    def score(self, batch: Batch) -> tuple[Rows, Tensor, Tensor]:
        """The batch as rows; log-probs and entropy `[B, S]` of its tokens now, just as a step computes them."""
        check_origins(batch, temperature=self._temperature)
        rows = self._lay_out(batch)
        scores = self._passes.score(rows)
        return rows, scores.logprobs, scores.entropy

    def _lay_out(self, batch: Batch) -> Rows:
        check_vocabulary(batch, self._vocab_size)
        rows = collate(batch, pad_id=self._pad_id, cache=self._objective.cache)
        if self._routing_layout is None:
            return rows
        return replace(rows, routing=collate_routing(batch, self._routing_layout))

    def weights(self) -> Mapping[str, Tensor]:
        return named_weights(self._ranks.whole)

    def next_logprobs(self, prompts: Sequence[Ints]) -> Floats:
        """Log-probs `[N, V]` of the token after each prompt, at temperature 1, as forward passes compute them now."""
        model = self._ranks.whole
        device = model.device
        with torch.inference_mode(), torch.autocast(device.type, self._autocast, self._autocast != torch.float32):
            rows = [model(torch.from_numpy(p).long()[None].to(device)).logits[0, -1].float() for p in prompts]
        return torch.log_softmax(torch.stack(rows), -1).cpu().numpy()

    def save(self, directory: Path) -> None:
        """Model and tokenizer in Hugging Face format, and the optimizer's state, all safetensors; a file a rank.

        Raises NonFiniteWeights: a checkpoint that no run can go on from must not push a sound one out.
        """
        if self._leads:
            self._require_finite()
            self._save_model(directory)
            if self._guard is not None:
                (directory / "guard.json").write_text(json.dumps(self._guard.state))
        save_optimizer(
            directory,
            self._optimizer,
            self._ranks,
            previous_gradient=self._previous_gradient,
            policy_version=self._policy_version,
            num_skipped=self._num_skipped,
        )
        self._ranks.wait()  # rank 0 returns to whoever takes the directory for whole

    def _require_finite(self) -> None:
        for name, parameter in self._ranks.whole.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise NonFiniteWeights(
                    f"parameter {name!r} of version {self._policy_version} is not finite, so it is not saved; "
                    "lower optimizer.lr and start from the newest checkpoint (model.path)"
                )

    def load(self, directory: Path) -> None:
        """Take up the state `save` wrote; the model itself was loaded from the same directory."""
        state = load_optimizer(directory, self._optimizer, self._ranks)
        self._policy_version, self._num_skipped, self._previous_gradient = state
        if self._guard is not None and (directory / "guard.json").is_file():
            self._guard.restore(json.loads((directory / "guard.json").read_text()))

    def _rate_scale(self, rows: Rows, logprobs: Tensor) -> dict[str, float]:
        """VCPO's `lr_scale` and `ess` of the whole batch; nothing when it is switched off.

        Raises ValueError when the engine returned no log-probs. A batch without sampled tokens scales to 0.
        """
        if not self._scales_rate:
            return {}
        if rows.behavior_logprobs is None:
            raise ValueError(
                "vcpo_lr_scale needs the log-probs the engine sampled with: set engines.logprobs = true, "
                "or optimizer.vcpo_lr_scale = false"
            )
        if not rows.mask.any():
            return {"lr_scale": 0.0, "ess": 0.0}
        scale, ess = vcpo_lr_scale(response_log_ratios(logprobs, rows.behavior_logprobs, rows.mask))
        return {"lr_scale": float(scale), "ess": float(ess)}

    def _step(self, step: int, rate_scale: float) -> dict[str, float]:
        """Clip, step, and move on to the next version."""
        gradient = self._ranks.gradient()
        norm = self._ranks.norm(gradient)
        self._policy_version += 1
        if not math.isfinite(float(norm)):
            self._count_skipped(step, float(norm))
            return {"step_skipped": 1.0, "grad_norm": 0.0, "grad_cosine": 0.0, "learning_rate": 0.0}
        self._num_skipped = 0
        cosine = self._cosine(gradient)
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._max_grad_norm, norm)
        rate = self._learning_rate(step) * rate_scale * (self._guard.lr_scale if self._guard is not None else 1.0)
        rate = self._ranks.first(rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._ranks.gather()
        return {"step_skipped": 0.0, "grad_norm": float(norm), "grad_cosine": cosine, "learning_rate": rate}

    def _count_skipped(self, step: int, norm: float) -> None:
        # The batch is committed, so a skip must be as deterministic as a step: a resumed run skips it again.
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED:
            raise NonFiniteGradient(
                f"step {step}: gradient norm is {norm}, the {self._num_skipped}th in a row; the last checkpoint is "
                "intact. Start a new run from it (model.path) with a lower optimizer.lr"
            )

    def _cosine(self, gradient: list[Tensor]) -> float:
        """cos(g_t, g_{t−1}) of the unclipped gradients; 0 at the first step or when switched off."""
        if not self._gradient_cosine:
            return 0.0
        cosine = _cosine(self._ranks, gradient, self._previous_gradient) if self._previous_gradient else 0.0
        self._previous_gradient = [g.clone() for g in gradient]
        return cosine


def _cosine(ranks: Ranks, gradient: list[Tensor], previous: list[Tensor]) -> float:
    """⟨a, b⟩ / (‖a‖·‖b‖) over all parameters; 0 when either is zero."""
    dot = sum(float((a * b).sum()) for a, b in zip(gradient, previous, strict=True))
    total = float(ranks.sum(torch.tensor(dot, dtype=torch.float64)))
    norms = float(ranks.norm(gradient) * ranks.norm(previous))
    return total / norms if norms else 0.0
