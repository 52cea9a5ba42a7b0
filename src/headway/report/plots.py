"""What a plot of the report is, and the plots that are lines over steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.report.figures import (
    Figure,
    Trace,
    Values,
    at_versions,
    axis,
    faded,
    line,
    smooth,
    steps_of,
    trained_tokens,
    wall_clock_s,
)
from headway.report.legend import Look
from headway.report.run_data import RunData

Drawing = list[Trace] | str
"""Traces; or, in words, why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One card of the page.

    `draw` gives one run's traces, or says why there are none. All runs share one plot; where `figure` is given, every
    run has a plot of its own, made by it.
    """

    key: str
    title: str
    caption: str
    metrics: tuple[str, ...]
    """Whose definitions it links to."""
    draw: Callable[[RunData, Look], Drawing] | None = None
    figure: Callable[[RunData, Look], Figure | str] | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Takes the whole width of the page."""


STEP_AXIS = axis("optimizer step")

WHY_MISSING = {
    "ess_tokens": "the engines kept no log-probs of the policy that sampled",
    "mean_abs_delta": "the engines kept no log-probs of the policy that sampled",
    "k3_behavior_policy": "the engines kept no log-probs of the policy that sampled",
    "mean_abs_log_rd": "only methods that read proximal log-probs split the ratio (see docs/old-logits.md)",
    "stopped_fraction": "the method neither clips, masks nor drops tokens",
    "loss_balance": "no policy loss was computed",
    "grad_cosine": "learner.gradient_cosine is off",
    "learner_idle": "the steps were trained again after a kill, which has no pace of its own",
}
"""The first metric of a plot to why a run that has steps may lack it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A metric as a line; `label` tells it from the other lines of its plot."""

    metric: str
    label: str = ""
    dash: str = "solid"


def lacks(run: RunData, metric: str) -> str:
    """Why a metric is not there."""
    if not run.steps:
        return "no step is on record yet"
    return WHY_MISSING.get(metric, f"no step on record has {metric}")


def over_steps(
    key: str, title: str, caption: str, *lines: Line, y: str, also: tuple[str, ...] = (), **layout: Any
) -> Plot:
    """Metrics over optimizer steps, all runs in one plot."""

    def draw(run: RunData, look: Look) -> Drawing:
        present = [one for one in lines if run.has(one.metric)]
        if not present:
            return lacks(run, lines[0].metric)
        x = steps_of(run)
        return [line(x, run.column(one.metric), name=one.label, color=look.color, dash=one.dash) for one in present]

    return Plot(
        key=key,
        title=title,
        caption=caption,
        metrics=(*(one.metric for one in lines), *also),
        draw=draw,
        layout={"xaxis": STEP_AXIS, "yaxis": axis(y, **layout)},
    )


def _reward_over(clock: Callable[[RunData], Values], scale: float) -> Callable[[RunData, Look], Drawing]:
    """Reward of every batch faintly, its running mean, and held-out accuracy where it was measured."""

    def draw(run: RunData, look: Look) -> Drawing:
        if not run.has("reward"):
            return lacks(run, "reward")
        x = [None if value is None else value / scale for value in clock(run)]
        reward = run.column("reward")
        window = max(1, min(20, len(reward) // 10))
        faint = faded(look.color, 0.3)
        return [
            line(x, reward, name="", color=faint, width=1, showlegend=False, hoverinfo="skip"),
            line(x, smooth(reward, window), name="reward", color=look.color),
            *_accuracies(run, look, x),
        ]

    return draw


def _accuracies(run: RunData, look: Look, clock: Values) -> list[Trace]:
    traces = []
    for split, symbol in (("validation", "circle-open"), ("test", "star")):
        found = [one for one in run.evaluations if one.get("split") == split and "accuracy" in one]
        if found:
            versions = [int(one.get("policy_version", 0)) for one in found]
            marker = {"symbol": symbol, "size": 9, "color": look.color, "line": {"width": 2, "color": look.color}}
            accuracy = [one["accuracy"] for one in found]
            traces.append(
                {"type": "scatter", "mode": "markers", "x": at_versions(run, clock, versions), "y": accuracy}
                | {"name": f"{split} accuracy", "marker": marker}
            )
    return traces


def _reward_layout(x: str) -> dict[str, Any]:
    return {"xaxis": axis(x), "yaxis": axis("reward", rangemode="normal")}


REWARD_TIME = Plot(
    key="reward_time",
    title="Reward against wall-clock",
    caption="What the time bought: running mean of the batch reward (faint: every batch), and held-out accuracy.",
    metrics=("reward", "accuracy", "elapsed_s"),
    draw=_reward_over(wall_clock_s, 60.0),
    layout=_reward_layout("minutes of training"),
)

REWARD_TOKENS = Plot(
    key="reward_tokens",
    title="Reward against trained tokens",
    caption="What the data bought: the same against sampled tokens that trained, whatever the hardware.",
    metrics=("reward", "accuracy", "num_tokens"),
    draw=_reward_over(trained_tokens, 1.0),
    layout=_reward_layout("trained tokens"),
)

LEARNING: Sequence[Plot] = (
    REWARD_TIME,
    REWARD_TOKENS,
    over_steps(
        "entropy",
        "Entropy of the policy",
        "Falling to zero: the policy has stopped exploring. Rising without end: it is coming apart.",
        Line("entropy"),
        y="nats",
    ),
    over_steps(
        "gradient",
        "Gradient norm",
        "Before clipping. Spikes that grow announce trouble earlier than the reward does.",
        Line("grad_norm"),
        y="‖g‖",
    ),
)

DRIFT: Sequence[Plot] = (
    over_steps(
        "delta",
        "How far the policy is from the one that sampled",
        "Mean |δ| of a token, and the k3 estimate of KL(μ‖πθ); both 0 when training on fresh data.",
        Line("mean_abs_delta", "mean |δ|"),
        Line("k3_behavior_policy", "k3", "dot"),
        y="nats",
    ),
    over_steps(
        "ess",
        "Effective sample size",
        "Share of the batch that the importance weights leave; low means a few tokens or responses decide the step.",
        Line("ess_tokens", "tokens"),
        Line("ess_responses", "responses", "dash"),
        y="share",
        range=[0, 1.02],
    ),
    over_steps(
        "factors",
        "Discrepancy r_d and staleness r_s",
        "The ratio split in two: engine against learner, r_d = π_prox/μ; updates since sampling, r_s = πθ/π_prox.",
        Line("mean_abs_log_rd", "|log r_d|"),
        Line("mean_abs_log_rs", "|log r_s|", "dash"),
        y="nats",
    ),
    over_steps(
        "cosine",
        "Cosine of successive gradients",
        "cos(g_t, g_{t−1}): above 0.5 for long precedes collapse by 2607.01083, not in our own studies.",
        Line("grad_cosine"),
        y="cosine",
        also=("guard_signs",),
        range=[-1, 1],
    ),
    over_steps(
        "balance",
        "Balance of the loss",
        "Weight of tokens with A > 0 over weight of those with A < 0, on a log scale; 1 is even.",
        Line("loss_balance"),
        y="Σ⁺ / Σ⁻",
        also=("loss_positive", "loss_negative"),
        type="log",
        rangemode="normal",
        tickvals=[0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 30, 100],
    ),
)

MACHINE: Sequence[Plot] = (
    over_steps(
        "idle",
        "Idle shares",
        "Learner idle: give it more engines or a larger max_staleness. Engines idle: the learner is the bottleneck.",
        Line("learner_idle", "learner"),
        Line("engine_idle", "engines", "dash"),
        y="share of the step",
        range=[0, 1.02],
    ),
    over_steps(
        "throughput",
        "Tokens a second",
        "What the engines sampled, and what the learner worked through while it computed (prompts included).",
        Line("sampled_tokens_per_s", "sampled"),
        Line("trained_tokens_per_s", "trained", "dash"),
        y="tokens/s",
    ),
)
