"""Every golden case, in float64, to 1e-9: loss, gradient, metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.algorithms import (
    ALGORITHMS,
    compute_advantages,
    compute_distillation_loss,
    compute_loss,
    ewma_beta,
    ewma_restarts,
    ewma_step,
    find_distillation,
    loglinear_proximal,
    vcpo_lr_scale,
)

TOLERANCE = 1e-9
CACHED_IDS = {"teacher_topk": "teacher_topk_ids", "student_topk": "rollout_student_topk_ids", "draws": "mc_ids"}


def load_cases() -> list[dict[str, Any]]:
    with np.load(Path(__file__).with_name("cases.npz"), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "index"}
        index = json.loads(str(file["index"]))

    def restore(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if set(value) == {"array"}:
            return arrays[value["array"]]
        return {key: restore(item) for key, item in value.items()}

    return [restore(case) for case in index]


CASES = load_cases()


def cases(*methods: str) -> Any:
    chosen = [case for case in CASES if case.get("method", "opd") in methods]
    return pytest.mark.parametrize("case", chosen, ids=lambda c: f"{c.get('method', 'opd')}-{c['seed']}")


def assert_close(actual: Tensor | float, expected: Tensor | float) -> None:
    error = torch.as_tensor(actual, dtype=torch.float64) - torch.as_tensor(expected, dtype=torch.float64)
    assert error.abs().max() <= TOLERANCE


def test_no_case_is_left_out() -> None:
    tested = {*ALGORITHMS, "opd", "advantages", "vcpo_lr_scale", "loglinear_proximal"}
    tested |= {"ppo_ewma_weights", "ppo_ewma_reset"}
    assert {case.get("method", "opd") for case in CASES} <= tested
    assert len(CASES) == 172


@cases(*ALGORITHMS)
def test_policy_loss_gradient_and_metrics(case: dict[str, Any]) -> None:
    inputs = {key: value for key, value in case["inputs"].items() if key != "rewards"}
    logprobs = inputs.pop("logprobs").clone().requires_grad_()
    loss, metrics = compute_loss(case["method"], logprobs=logprobs, **inputs, **case["params"])
    loss.backward()
    assert logprobs.grad is not None
    assert_close(loss.detach(), case["expected"]["loss"])
    assert_close(logprobs.grad, case["expected"]["grad_logprobs"])
    for name, value in case["expected"]["metrics"].items():
        assert_close(metrics[name], value)


@cases("opd")
def test_distillation_losses_and_their_gradients_in_logits(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    for name, expected in case["expected"].items():
        ids = inputs[CACHED_IDS[find_distillation(name).cache]].long()
        logits = inputs["student_logits"].clone().requires_grad_()
        student, teacher, rollout = (
            x.log_softmax(-1).gather(-1, ids)
            for x in (logits, inputs["teacher_logits"], inputs["rollout_student_logits"])
        )
        params = {"clip": inputs["clip"].tolist()} if name == "mc_clipped" else {}
        loss, _ = compute_distillation_loss(
            name,
            student_logprobs=student,
            teacher_logprobs=teacher,
            rollout_logprobs=rollout,
            mask=inputs["mask"],
            **params,
        )
        loss.backward()
        assert logits.grad is not None
        assert_close(loss.detach(), expected["loss"])
        assert_close(logits.grad, expected["grad_student_logits"])


@cases("advantages")
def test_advantages(case: dict[str, Any]) -> None:
    for name, expected in case["expected"].items():
        advantages, metrics = compute_advantages(name, **case["inputs"])
        assert_close(advantages, expected)
        assert metrics["num_groups"] == 3
        assert metrics["num_degenerate_groups"] == 1


@cases("vcpo_lr_scale")
def test_vcpo_scale_and_ess(case: dict[str, Any]) -> None:
    scale, ess = vcpo_lr_scale(case["inputs"]["sequence_log_ratio"])
    assert_close(scale, case["expected"]["lr_scale"])
    assert_close(ess, case["expected"]["ess"])


@cases("loglinear_proximal")
def test_loglinear_proximal(case: dict[str, Any]) -> None:
    assert_close(loglinear_proximal(**case["inputs"]), case["expected"]["proximal_logprobs"])


@cases("ppo_ewma_weights", "ppo_ewma_reset")
def test_averaged_parameters_with_and_without_restart(case: dict[str, Any]) -> None:
    params, theta = case["params"], case["inputs"]["theta"]
    active = case["inputs"].get("active_fraction", torch.ones(len(theta)))
    beta = ewma_beta(params["window"])
    assert_close(beta, params["beta"])
    weight, average = 0.0, torch.zeros_like(theta[0])
    for step, parameters in enumerate(theta):
        restart = ewma_restarts(float(active[step]), params.get("reset_below", 0.9))
        update = ewma_step(weight, beta, restart=restart)
        weight, average = update.weight, torch.lerp(average, parameters, update.theta_share)
        assert_close(average, case["expected"]["theta_prox"][step])
