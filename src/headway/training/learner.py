"""The built-in learner: one process, AdamW, micro-batches with global denominators."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.algorithms import (
    EntropySource,
    batch_statistics,
    compute_advantages,
    compute_loss,
    entropy_error_metrics,
    find_algorithm,
    response_log_ratios,
    token_weights,
    uncentered_groups,
    vcpo_lr_scale,
)
from headway.errors import HeadwayError
from headway.models.loading import named_weights
from headway.models.routing import Replay
from headway.training.batching import Rows, check_origins, collate, micro_batches
from headway.training.guard import Guard
from headway.training.optimizer_state import load_optimizer, save_optimizer
from headway.training.routing import Layout, agreement, collate_routing, replaying
from headway.training.scoring import score_rows
from headway.types import Batch, Floats, Ints, StepReport

MAX_SKIPPED = 5
"""Steps in a row with a non-finite gradient after which training stops."""


class NonFiniteGradient(HeadwayError, ArithmeticError):
    """Step after step the gradient holds NaN or infinity; the parameters were not touched."""


class PartialGroup(HeadwayError, ValueError):
    """A method that is right over whole groups only was given one whose members lost all their tokens."""


class TorchLearner:
    """Trains a causal LM with one of `headway.algorithms`; deterministic in its state and the batch.

    Every token weighs what `token_weights` says of the whole batch, so neither the micro-batch split nor padding
    changes the result. Where a method needs statistics of the whole batch, log-probs of all micro-batches are
    computed first, without gradient.

    Args:
        model: float32 master weights, on its device.
        algorithm: a key of `ALGORITHMS`; `params` override its defaults.
        temperature: of the rollouts; log-probs are taken at the same one.
        learning_rate: optimizer step to rate.
        autocast: what forward passes compute in.
        save_model: writes model and tokenizer in Hugging Face format to a directory.
        routing_replay: take the experts the engine recorded (2510.11370); the model must be a mixture of experts.
        guard: sees every step's metrics and may scale the learning rate; saved with the state.
        behavior_entropy: where the entropy of the policy that sampled comes from.
        vcpo_lr_scale: scale the rate of every step by the batch's effective sample size.
    """

    def __init__(
        self,
        model: Any,
        *,
        algorithm: str,
        params: Mapping[str, Any],
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
        save_model: Callable[[Path], object],
        policy_version: int = 0,
        routing_replay: bool = False,
        guard: Guard | None = None,
        behavior_entropy: EntropySource = "engine",
        vcpo_lr_scale: bool = False,
    ) -> None:
        self._model = model
        self._routing_layout = Layout.of(model) if routing_replay else None
        method = find_algorithm(algorithm)
        self._algorithm = algorithm
        self._advantage = method.advantage
        self._params = method.resolve(params)
        self._needs_whole_groups = "whole_groups" in method.needs
        self._takes_statistics = "whole_batch" in method.needs_for(params)
        self._behavior_entropy: EntropySource = behavior_entropy
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._scales_rate = vcpo_lr_scale
        self._max_grad_norm = max_grad_norm
        self._gradient_cosine = gradient_cosine
        self._num_skipped = 0
        self._micro_batch_tokens = micro_batch_tokens
        self._pad_id = pad_id
        self._autocast = autocast
        self._save_model = save_model
        self._policy_version = policy_version
        self._guard = guard
        self._parameters = dict(model.named_parameters())
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        plain = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)
        self._previous_gradient: list[Tensor] = []

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def model(self) -> Any:
        """The policy being trained."""
        return self._model

    def train(self, batch: Batch) -> StepReport:
        """One optimizer step; one whose gradient is not finite changes nothing but the version.

        Raises NonFiniteGradient after `MAX_SKIPPED` of those in a row, ValueError for a batch of another version,
        PartialGroup.
        """
        if batch.policy_version != self._policy_version:
            raise ValueError(f"batch of version {batch.policy_version} given to a learner at {self._policy_version}")
        begun = time.monotonic()
        check_origins(batch, temperature=self._temperature)
        rows = self._lay_out(batch)
        advantages, metrics = compute_advantages(self._advantage, rewards=rows.rewards, group=rows.group)
        self._require_whole_groups(batch, rows, advantages)
        weights = token_weights(self._params["reduction"], rows.mask, rows.group, l_max=self._params["l_max"])
        logprobs, entropy, replays = self._backward(rows, advantages, weights)
        # Once more over the whole batch, so that metrics do not depend on the micro-batch split either.
        loss, loss_metrics = self._loss(rows, logprobs, entropy, advantages)
        scale_metrics = self._rate_scale(rows, logprobs)
        gradient_metrics = self._step(batch.step, scale_metrics.get("lr_scale", 1.0))
        seconds = time.monotonic() - begun
        found = {
            "loss": float(loss),
            "entropy": float(entropy[rows.mask].mean()) if rows.mask.any() else 0.0,
            **{name: float(value) for name, value in {**metrics, **loss_metrics}.items()},
            **agreement(replays),
            **self._entropy_error(rows, entropy),
            **scale_metrics,
            **gradient_metrics,
            "train_s": seconds,
            "trained_tokens_per_s": float(rows.lengths.sum()) / seconds,
        }
        if self._guard is not None:
            found |= self._guard.observe(found)
        return StepReport(step=batch.step, policy_version=batch.policy_version, metrics=found)

    def _require_whole_groups(self, batch: Batch, rows: Rows, advantages: Tensor) -> None:
        """Refuse a group whose baseline counts a member that the loss cannot see.

        Members that are missing from the group are no fault: its advantages are centered over those that are there.
        """
        empty = ~rows.mask.any(1)
        if not self._needs_whole_groups or not empty.any():
            return
        values = advantages.unsqueeze(1).expand(rows.mask.shape)
        found = uncentered_groups(values, rows.mask, rows.group).tolist()
        if found:
            members = torch.nonzero(empty[rows.group == found[0]]).flatten().tolist()
            raise PartialGroup(
                f"group {batch.groups[found[0]].group_id}: members {members} have no token left to train, so its "
                f"advantages no longer sum to zero, which {self._algorithm} needs: give whole groups "
                '(over_bound = "wait" or "drop"), or take those members out, which centers the group again'
            )

    def score(self, batch: Batch) -> tuple[Rows, Tensor, Tensor]:
        """The batch as rows; log-probs and entropy `[B, S]` of its tokens now, just as a step computes them."""
        check_origins(batch, temperature=self._temperature)
        rows = self._lay_out(batch)
        return rows, *self._score(rows, micro_batches(rows.lengths, max_tokens=self._micro_batch_tokens))

    def _lay_out(self, batch: Batch) -> Rows:
        rows = collate(batch, pad_id=self._pad_id)
        if self._routing_layout is None:
            return rows
        return replace(rows, routing=collate_routing(batch, self._routing_layout))

    def weights(self) -> Mapping[str, Tensor]:
        return named_weights(self._model)

    def next_logprobs(self, prompts: Sequence[Ints]) -> Floats:
        """Log-probs `[N, V]` of the token after each prompt, at temperature 1, as forward passes compute them now."""
        device = self._model.device
        with torch.inference_mode(), torch.autocast(device.type, self._autocast, self._autocast != torch.float32):
            rows = [self._model(torch.from_numpy(p).long()[None].to(device)).logits[0, -1].float() for p in prompts]
        return torch.log_softmax(torch.stack(rows), -1).cpu().numpy()

    def save(self, directory: Path) -> None:
        """Model and tokenizer in Hugging Face format, and the optimizer's state, all safetensors."""
        self._save_model(directory)
        save_optimizer(directory, self._optimizer, self._parameters, self._previous_gradient, self._policy_version)
        if self._guard is not None:
            (directory / "guard.json").write_text(json.dumps(self._guard.state))

    def load(self, directory: Path) -> None:
        """Take up the state `save` wrote; the model itself was loaded from the same directory."""
        self._policy_version, self._previous_gradient = load_optimizer(directory, self._optimizer, self._parameters)
        if self._guard is not None and (directory / "guard.json").is_file():
            self._guard.restore(json.loads((directory / "guard.json").read_text()))

    def _backward(self, rows: Rows, advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[Replay]]:
        """Accumulate the gradient of the whole batch; return its detached log-probs and entropy, `[B, S]`.

        Where routing is replayed, also what the replays met, one a micro-batch.
        """
        self._optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(rows.lengths, max_tokens=self._micro_batch_tokens)
        statistics = self._statistics(rows, parts, advantages)
        logprobs = self._blank(rows)
        entropy = self._blank(rows)
        replays: list[Replay] = []
        for part, live in self._with_and_without_gradient(rows, parts, advantages):
            some = rows.select(part)
            width = some.input_ids.shape[1]
            # Around the backward pass too: gradient checkpointing runs the layers again there.
            with replaying(self._model, some) as replay:
                with torch.set_grad_enabled(live):
                    found, found_entropy = self._forward(some)
                if live:
                    # A micro-batch that is the whole batch takes its own statistics.
                    share = {"weights": weights[part, :width].to(found.device), "statistics": statistics}
                    share = {} if len(part) == len(rows.mask) else share
                    loss, _ = self._loss(some, found, found_entropy, advantages[part], **share)
                    loss.backward()
            if replay is not None:
                replays.append(replay)
            logprobs[part, :width] = found.detach().cpu()
            entropy[part, :width] = found_entropy.detach().cpu()
        return logprobs, entropy, replays

    def _with_and_without_gradient(
        self, rows: Rows, parts: list[Tensor], advantages: Tensor
    ) -> Iterator[tuple[Tensor, bool]]:
        """Micro-batches, and whether they need a backward pass.

        A response of advantage 0 has no gradient. Where a method looks at each response alone, such responses are
        only scored, for the metrics: a third of the work. SAT's quantile looks at all tokens of a micro-batch.
        """
        if "scope" in self._params:
            yield from ((part, True) for part in parts)
            return
        for live in (True, False):
            chosen = torch.nonzero((advantages != 0) == live).flatten()
            if len(chosen):
                for part in micro_batches(rows.lengths[chosen], max_tokens=self._micro_batch_tokens):
                    yield chosen[part], live

    def _statistics(self, rows: Rows, parts: list[Tensor], advantages: Tensor) -> dict[str, Tensor] | None:
        """What the method takes over the whole batch, from a first pass without gradient; None if it needs none."""
        if not self._takes_statistics or len(parts) == 1:
            return None
        logprobs, entropy = self._score(rows, parts)
        return batch_statistics(self._algorithm, **self._loss_inputs(rows, logprobs, entropy, advantages))

    def _score(self, rows: Rows, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy `[B, S]` of all rows, without gradient."""
        logprobs, entropy = self._blank(rows), self._blank(rows)
        with torch.no_grad():
            for part in parts:
                some = rows.select(part)
                width = some.input_ids.shape[1]
                with replaying(self._model, some):
                    found, found_entropy = self._forward(some)
                logprobs[part, :width], entropy[part, :width] = found.cpu(), found_entropy.cpu()
        return logprobs, entropy

    def _blank(self, rows: Rows) -> Tensor:
        """Zeros `[B, S]` in the precision of the master weights: rounding would move tokens across thresholds."""
        return torch.zeros(rows.input_ids.shape, dtype=next(iter(self._parameters.values())).dtype)

    def _forward(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return score_rows(self._model, rows, temperature=self._temperature, autocast=self._autocast)

    def _loss(
        self, rows: Rows, logprobs: Tensor, entropy: Tensor, advantages: Tensor, **share: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of these rows: of the whole batch, or with `share` of one micro-batch of it."""
        group = rows.group.to(logprobs.device)
        inputs = self._loss_inputs(rows, logprobs, entropy, advantages)
        return compute_loss(self._algorithm, group=group, **inputs, **share)

    def _loss_inputs(self, rows: Rows, logprobs: Tensor, entropy: Tensor, advantages: Tensor) -> dict[str, Any]:
        moved = rows.to(logprobs.device)
        return {
            "logprobs": logprobs,
            "behavior_logprobs": moved.behavior_logprobs,
            "behavior_entropy": self._entropy_used(moved, entropy),
            "advantages": advantages.to(logprobs.device).unsqueeze(1).expand_as(logprobs),
            "mask": moved.mask,
            **self._params,
        }

    def _entropy_used(self, rows: Rows, entropy: Tensor) -> Tensor | None:
        """What stands for the behavior entropy; `entropy` is that of the policy being trained."""
        match self._behavior_entropy:
            case "engine":
                return rows.behavior_entropy
            case "topk_lower_bound":
                return rows.entropy_bound
            case "learner":
                return entropy

    def _entropy_error(self, rows: Rows, entropy: Tensor) -> dict[str, float]:
        """The error of an approximate behavior entropy, where the engine gives the exact one to hold it against."""
        used = self._entropy_used(rows, entropy)
        if self._behavior_entropy == "engine" or used is None or rows.behavior_entropy is None:
            return {}
        metrics = entropy_error_metrics(used, rows.behavior_entropy, rows.mask)
        return {name: float(value) for name, value in metrics.items()}

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
        parameters = list(self._parameters.values())
        gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        norm = torch.nn.utils.get_total_norm(gradient)
        self._policy_version += 1
        if not math.isfinite(float(norm)):
            self._count_skipped(step, float(norm))
            return {"step_skipped": 1.0, "grad_norm": 0.0, "grad_cosine": 0.0, "learning_rate": 0.0}
        self._num_skipped = 0
        cosine = self._cosine(gradient)
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        rate = self._learning_rate(step) * rate_scale * (self._guard.lr_scale if self._guard is not None else 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
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
        cosine = _cosine(gradient, self._previous_gradient) if self._previous_gradient else 0.0
        self._previous_gradient = [g.clone() for g in gradient]
        return cosine


def _cosine(gradient: list[Tensor], previous: list[Tensor]) -> float:
    """⟨a, b⟩ / (‖a‖·‖b‖) over all parameters; 0 when either is zero."""
    dot = sum(float((a * b).sum()) for a, b in zip(gradient, previous, strict=True))
    norms = float(torch.nn.utils.get_total_norm(gradient) * torch.nn.utils.get_total_norm(previous))
    return dot / norms if norms else 0.0
