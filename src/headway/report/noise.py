"""What `headway doctor --engine` measured, as tables that need no other page to be understood. Reads plain data."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

FINE, TOO_HIGH = 1e-3, 1e-2
"""Shares of tokens cut by noise alone: below the first nothing is lost, from the second on the method is misled."""

_DO_NOT = (
    "compute in float32; where that does not mend it, engine and learner compute different functions: do not train "
    "with this pair"
)

_MENDS = {
    "estr": "raise algorithm_params.tau, or compute in float32 (model.dtype)",
    **dict.fromkeys(("ppo", "grpo", "dapo"), _DO_NOT),
    "decoupled_masked": "set algorithm_params.band to the smallest band above or more, or compute in float32",
    "gspo": "raise algorithm_params.eps_low and eps_high well above the mean δ of a response, or compute in float32",
    "mis": "widen algorithm_params.low and high, or compute in float32",
    "tis": "raise algorithm_params.cap, or compute in float32",
    "icepop": "widen algorithm_params.low and high, or compute in float32",
}
"""Method to what one does when noise alone makes it cut tokens."""


def noise_tables(noise: Mapping[str, Any]) -> list[RenderableType]:
    """What was measured, |δ| by entropy, and what every threshold would wrongly cut.

    `noise` is an `EngineNoise` as a dict. Paths in it may hold brackets: print with `markup=False`.
    """
    floor = noise["floor"]
    heading = (
        f"Noise floor of {noise['model']} on task {noise['task']}\n"
        f"engine {noise['engine']} in {noise['engine_dtype']}, learner in {noise['learner_dtype']}, "
        f"{noise['num_responses']} responses, {floor['num_tokens']} tokens, temperature {noise['temperature']:g}\n\n"
        "Engine and learner hold the same weights, so both should give a token the same log-probability. δ is the "
        "difference in nats, r = e^δ the ratio that training looks at. Here nothing was learned in between, so δ is "
        "noise of the arithmetic; a method that cuts tokens at a threshold near it throws good data away.\n"
    )
    return [heading, _size(floor), _by_entropy(floor), _wrongly_cut(floor), _advice(noise)]


def _advice(noise: Mapping[str, Any]) -> str:
    lines = [f"smallest band that keeps 99 % of the tokens: 1 + {math.expm1(noise['floor']['p99_abs_delta']):.1e}"]
    cut = dict.fromkeys(one["method"] for one in noise["floor"]["cuts"] if one["share"] >= FINE)
    lines += [f"{method} cuts too much: {_MENDS[method]}" for method in cut]
    if not any(cut["method"] == noise["algorithm"] for cut in noise["floor"]["cuts"]):
        lines.append(f"{noise['algorithm']}, the algorithm of the settings, has no threshold that is judged here")
    if noise["kept_mass"] < 1:
        lines.append(
            f"top_p/top_k left {noise['kept_mass']:.4f} of the probability, and the learner cuts none: that alone is "
            f"{-math.log(noise['kept_mass']):.1e} nats of δ; sampling.top_p = 1 and sampling.top_k = 0 remove it"
        )
    return "\n".join(lines)


def _size(floor: Mapping[str, Any]) -> Table:
    table = Table("how large", "nats", "meaning", title="size of the noise")
    table.add_row("mean |δ|", _nats(floor["mean_abs_delta"]), "of one token")
    table.add_row("99 % |δ|", _nats(floor["p99_abs_delta"]), "one token in a hundred is further off")
    table.add_row(
        "max |δ|",
        _nats(floor["max_abs_delta"]),
        f"worst token: its ratio r is {math.expm1(floor['max_abs_delta']):.2g} from 1",
    )
    table.add_row(
        "max |Σδ|", _nats(floor["max_abs_response_delta"]), "worst whole response, which GSPO, TOPR and VCPO look at"
    )
    table.add_row(
        "k3 KL", _nats(floor["k3"]), "divergence between engine and learner; training logs it as k3_behavior_policy"
    )
    return table


def _by_entropy(floor: Mapping[str, Any]) -> Table:
    table = Table("entropy, nats", "tokens", "mean |δ|", "99 % |δ|", "max |δ|", title="by how unsure the policy was")
    for one in floor["bins"]:
        name = f"{one['low']:g} to {one['high']:g}" if one["high"] is not None else f"over {one['low']:g}"
        sizes = (one["mean_abs_delta"], one["p99_abs_delta"], one["max_abs_delta"])
        table.add_row(name, f"{one['share']:.1%}", *(_nats(size) if one["share"] else "–" for size in sizes))
    return table


def _wrongly_cut(floor: Mapping[str, Any]) -> Table:
    table = Table(
        "method", "threshold", "wrongly cut", "verdict", title="perfectly fresh tokens that a method would cut"
    )
    for cut in floor["cuts"]:
        verdict = "fine" if cut["share"] < FINE else "watch" if cut["share"] < TOO_HIGH else "too high"
        table.add_row(cut["method"], cut["threshold"], f"{cut['share']:.2%}", verdict)
    return table


def _nats(value: float) -> str:
    return f"{value:.1e}"
