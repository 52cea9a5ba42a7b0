"""The optimizer step does not depend on how a batch is cut, padded or ordered, and changes nothing it should not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.algorithms import ALGORITHMS, compute_advantages, compute_loss, find_algorithm, token_weights
from headway.errors import HeadwayError
from headway.training.batching import micro_batches
from headway.training.finite import NonFiniteSample
from headway.training.guard import Guard, Limits
from headway.training.learner import MAX_SKIPPED, NonFiniteGradient, TorchLearner
from headway.training.objectives import Objective, PolicyObjective
from headway.types import Batch, Group, Prompt, Response

CONFIG = Qwen3Config(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)
AVERAGED = {"quantile_value", "gate_fraction", "mean_eps_low", "mean_eps_high", "kept_fraction", "stopped_fraction"}
METHODS = [name for name in ALGORITHMS if name != "ppo_ewma"]


def learner(
    algorithm: str = "grpo",
    *,
    micro_batch_tokens: int = 10_000,
    behavior_entropy: Any = "engine",
    vcpo_lr_scale: bool = False,
    guard: Guard | None = None,
    **params: Any,
) -> TorchLearner:
    objective = PolicyObjective(algorithm, params, behavior_entropy=behavior_entropy)
    return learner_of(objective, micro_batch_tokens, vcpo_lr_scale, guard)


def learner_of(
    objective: Objective,
    micro_batch_tokens: int = 10_000,
    vcpo_lr_scale: bool = False,
    guard: Guard | None = None,
) -> TorchLearner:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return TorchLearner(
        Qwen3ForCausalLM(CONFIG).double(),
        objective=objective,
        temperature=1.0,
        learning_rate=lambda step: 1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_cosine=True,
        micro_batch_tokens=micro_batch_tokens,
        pad_id=0,
        autocast=torch.float32,
        save_model=lambda directory: None,
        guard=guard,
        vcpo_lr_scale=vcpo_lr_scale,
    )


def batch(seed: int, step: int = 0, reward: float | None = None) -> Batch:
    """Three groups of four; the last group's rewards are all equal."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(3):
        prompt = Prompt(group_id, "train", rng.integers(0, 20, rng.integers(1, 6)).astype(np.int32))
        responses = []
        for _ in range(4):
            length = int(rng.integers(1, 7))
            mask = rng.random(length) < 0.8
            mask[-1] = True
            value = 1.0 if group_id == 2 else float(rng.integers(0, 3))
            responses.append(
                Response(
                    token_ids=rng.integers(0, 20, length).astype(np.int32),
                    mask=mask,
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    reward=value if reward is None else reward,
                    behavior_logprobs=np.where(mask, rng.normal(-3, 0.3, length), 0).astype(np.float32),
                    behavior_entropy=np.where(mask, rng.uniform(0.1, 3, length), 0).astype(np.float32),
                )
            )
        groups.append(Group(group_id, prompt, tuple(responses)))
    return Batch(step, step, tuple(groups))


def parameters_after(one: TorchLearner, given_batch: Batch) -> dict[str, torch.Tensor]:
    """Of one step, with the gradient before it is clipped: AdamW's first step shows little but its signs."""
    one.accumulate(given_batch)
    gradient = {f"gradient of {n}": p.grad.clone() for n, p in one._parameters.items() if p.grad is not None}
    one.step()
    return gradient | {name: tensor.clone() for name, tensor in one.weights().items()}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("algorithm", METHODS)
def test_the_step_does_not_depend_on_the_micro_batch_split(algorithm: str):
    params: dict[str, Any] = {"scope": "batch"} if "scope" in ALGORITHMS[algorithm].defaults else {}
    whole = parameters_after(learner(algorithm, **params), batch(1))
    split = parameters_after(learner(algorithm, micro_batch_tokens=12, **params), batch(1))
    assert_same(whole, split)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), max_tokens=st.integers(1, 60))
def test_any_split_gives_the_same_step_and_the_same_metrics(seed: int, max_tokens: int):
    one, two = (learner(micro_batch_tokens=n, vcpo_lr_scale=True) for n in (10_000, max_tokens))
    reports = [each.train(batch(seed)).metrics for each in (one, two)]
    for name in set(reports[0]) - {"train_s", "trained_tokens_per_s"}:
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-4, abs=1e-5), name


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), max_tokens=st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int):
    parts = micro_batches(torch.tensor(lengths), max_tokens=max_tokens)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[row] for row in part.tolist())
        assert padded <= max_tokens or len(part) == 1


def test_a_batch_that_teaches_nothing_moves_no_parameter():
    one = learner()
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    assert_same(before, parameters_after(one, batch(3, reward=1.0)))
    assert one.policy_version == 1


def broken() -> TorchLearner:
    """Its gradient is never finite."""
    one = learner()
    parameter = next(p for n, p in one._parameters.items() if "norm" in n)
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    return one


def test_a_non_finite_gradient_changes_nothing_but_the_version_and_stops_the_run_if_it_stays():
    one = broken()
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    for step in range(MAX_SKIPPED):
        assert one.train(batch(step, step=step)).metrics["step_skipped"] == 1
    assert_same(before, dict(one.weights()))
    with pytest.raises(NonFiniteGradient, match="in a row"):
        one.train(batch(9, step=MAX_SKIPPED))


def test_steps_skipped_before_a_stop_count_after_it(tmp_path: Path):
    first, second = broken(), broken()
    for step in range(MAX_SKIPPED):
        first.train(batch(step, step=step))
    first.save(tmp_path)
    second.load(tmp_path)
    with pytest.raises(NonFiniteGradient, match="in a row"):
        second.train(batch(9, step=MAX_SKIPPED))


def test_a_saved_learner_goes_on_bit_by_bit(tmp_path: Path):
    unbroken = learner()
    unbroken.train(batch(1))
    unbroken.save(tmp_path)
    resumed = learner()
    resumed.model.load_state_dict(unbroken.model.state_dict())
    resumed.load(tmp_path)
    reports = [each.train(batch(2, step=1)).metrics for each in (unbroken, resumed)]
    assert reports[0]["grad_cosine"] == reports[1]["grad_cosine"]
    for name, tensor in unbroken.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])


def test_a_batch_of_another_version_is_refused():
    with pytest.raises(ValueError, match="batch of version 3 given to a learner at 0"):
        learner().train(batch(0, step=3))


def watched() -> TorchLearner:
    """The ESS sign always stands, so the rate halves every two steps."""
    return learner(guard=Guard(Limits(window=2, ess=1.1), action="lower_lr", max_staleness=4))


def test_a_guard_lowers_the_rate_of_later_steps_and_a_resumed_learner_goes_on_with_it(tmp_path: Path):
    whole, first, second = watched(), watched(), watched()
    rates = [whole.train(batch(step, step)).metrics["learning_rate"] for step in range(6)]
    assert rates == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    for step in range(3):
        first.train(batch(step, step))
    first.save(tmp_path)
    second.load(tmp_path)
    assert [second.train(batch(s, s)).metrics["learning_rate"] for s in range(3, 6)] == rates[3:]


@pytest.mark.parametrize("algorithm", ["sat", "sat_gspo", "m2po"])
def test_a_scope_of_the_micro_batch_logs_what_each_micro_batch_used(algorithm: str):
    own: dict[str, Any] = {"quantile": 0.5} if algorithm != "m2po" else {"budget": 0.01}
    params: dict[str, Any] = own | {"scope": "micro_batch"}
    one = learner(algorithm, micro_batch_tokens=40, **params)
    rows, logprobs, _ = one.score(batch(5))
    parts = micro_batches(rows.lengths, max_tokens=40)
    assert len(parts) > 1
    found = one.train(batch(5)).metrics
    advantages, _ = compute_advantages("grpo", rewards=rows.rewards, group=rows.group)
    spread = advantages.unsqueeze(1).expand_as(logprobs)
    weights = token_weights(find_algorithm(algorithm).reduction, rows.mask, rows.group)
    share = rows.mask.sum().double()
    loss, means, smallest = 0.0, dict.fromkeys(AVERAGED & found.keys(), 0.0), 1.0
    for part in parts:
        assert rows.behavior_logprobs is not None
        inputs: dict[str, Any] = {"logprobs": logprobs[part], "behavior_logprobs": rows.behavior_logprobs[part]}
        inputs |= {"advantages": spread[part], "mask": rows.mask[part], "weights": weights[part]}
        one_loss, metrics = compute_loss(algorithm, **inputs, **params)
        loss += float(one_loss)
        means = {name: value + float(metrics[name] * rows.mask[part].sum() / share) for name, value in means.items()}
        smallest = min(smallest, float(metrics.get("min_scale", 1.0)))
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert means and {name: found[name] for name in means} == pytest.approx(means, rel=1e-5)
    assert found.get("min_scale", 1.0) == pytest.approx(smallest, rel=1e-5)


def with_behavior(given_batch: Batch, group: int, member: int, token: int, value: float) -> Batch:
    groups = list(given_batch.groups)
    responses = list(groups[group].responses)
    logprobs = np.array(responses[member].behavior_logprobs)
    mask = np.array(responses[member].mask)
    logprobs[token], mask[token] = value, True
    responses[member] = replace(responses[member], behavior_logprobs=logprobs, mask=mask)
    groups[group] = replace(groups[group], responses=tuple(responses))
    return replace(given_batch, groups=tuple(groups))


@pytest.mark.parametrize("micro_batch_tokens", [20, 10_000])
@pytest.mark.parametrize("group", [0, 2])
def test_a_non_finite_logprob_is_refused_with_its_token_and_its_mend(micro_batch_tokens: int, group: int):
    """Group 2 teaches nothing, so its rows are only scored."""
    one = learner(micro_batch_tokens=micro_batch_tokens)
    given_batch = with_behavior(batch(1), group, 3, 0, float("-inf"))
    with pytest.raises(NonFiniteSample) as refused:
        one.train(given_batch)
    token_id = given_batch.groups[group].responses[3].token_ids[0]
    message = str(refused.value)
    assert f"step 0: behavior_logprobs of group {group}, member 3, token 0 (id {token_id}) is -inf" in message
    assert "as the engine gave it (1 such values)" in message
    assert "resume` trains it again and stops here again" in message and "model.path" in message
    assert isinstance(refused.value, HeadwayError) and "\n" not in message
    assert one.policy_version == 0


def test_the_policys_own_non_finite_logprobs_are_refused_with_their_mend():
    one = learner()
    with torch.no_grad():
        one.model.lm_head.weight[int(batch(1).groups[0].responses[0].token_ids[-1])] = float("nan")
    complaint = r"logprobs of group 0, member 0, .* the policy being trained gave it .* a lower optimizer\.lr"
    with pytest.raises(NonFiniteSample, match=complaint):
        one.train(batch(1))
