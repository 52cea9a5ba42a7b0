"""The live view of a run in the terminal, and the table at its end."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.accounts import Audit
from headway.config import RunConfig

_LINE_EVERY_S = 5.0
"""How often a run without a terminal prints a line."""


class TerminalView:
    """Shows the last step, the evaluations and the pace; on a plain stream it prints a line now and then."""

    def __init__(self, config: RunConfig, *, console: Console) -> None:
        self._config = config
        self._console = console
        self._step: Mapping[str, Any] = {}
        self._evaluations: dict[str, Mapping[str, Any]] = {}
        self._last_line = time.monotonic()
        self._first_step_at = 0.0
        self._first_step: int | None = None
        # Drawing takes 2.6 ms of the interpreter that the learner needs: four times a second would be 1 % of a run.
        self._live = Live(console=console, refresh_per_second=0.5, get_renderable=self._render)

    def __enter__(self) -> "TerminalView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "evaluation":
            self._evaluations[record["split"]] = record
        elif record.get("redone"):
            self.say(f"step {record['step'] + 1} trained again")
            return
        else:
            self._step = record
            if self._first_step is None:
                self._first_step, self._first_step_at = record["step"], time.monotonic()
        due = record["kind"] == "evaluation" or time.monotonic() - self._last_line > _LINE_EVERY_S
        if due and not self._console.is_terminal:
            self._last_line = time.monotonic()
            self._console.print(self._line(record), highlight=False, soft_wrap=True)

    def say(self, message: str) -> None:
        """A message above the live view."""
        self._console.print(message, style="yellow", markup=False, highlight=False)

    def _line(self, record: Mapping[str, Any]) -> str:
        if record["kind"] == "evaluation":
            return f"version {record['policy_version']}: {record['split']} accuracy {record['accuracy']:.3f}"
        return (
            f"step {record['step'] + 1}/{self._config.num_steps}  {_signal(record)}  "
            f"staleness {record['staleness_token_mean']:.2f} (max {record['staleness_token_max']:.0f})  "
            f"engines {_pace(record, 'sampled', 'engine')}  learner {_pace(record, 'trained', 'learner')}  "
            f"ETA {self._eta()}"
        )

    def _render(self) -> RenderableType:
        step = self._step
        done = step["step"] + 1 if step else 0
        head = Text.assemble(
            ("headway ", "bold"),
            f"{self._config.label} on {self._config.task.name}, max_staleness {self._config.max_staleness}  ",
            f"step {done}/{self._config.num_steps}  ETA {self._eta()}",
        )
        bar = ProgressBar(total=self._config.num_steps, completed=done, width=60)
        return Group(head, bar, self._numbers()) if step else Group(head, bar)

    def _numbers(self) -> Table:
        step = self._step
        table = Table.grid(padding=(0, 3))
        accuracy = "  ".join(
            f"{split} {e['accuracy']:.3f} (version {e['policy_version']})" for split, e in self._evaluations.items()
        )
        table.add_row("learns from", _signal(step), "held-out accuracy", accuracy or "not yet")
        table.add_row(
            "staleness",
            f"{step['staleness_token_mean']:.2f}, max {step['staleness_token_max']:.0f}",
            "groups",
            f"{step['num_generating']} generating, {step['num_ready']} ready",
        )
        table.add_row(
            "engines",
            _pace(step, "sampled", "engine"),
            "learner",
            _pace(step, "trained", "learner"),
        )
        return table

    def _eta(self) -> str:
        if self._first_step is None or self._step["step"] == self._first_step:
            return "…"
        done = self._step["step"] + 1
        # From step to step: a cold start before the first one says nothing about the rest.
        pace = (time.monotonic() - self._first_step_at) / (self._step["step"] - self._first_step)
        return f"{pace * (self._config.num_steps - done):.0f} s"


def _signal(step: Mapping[str, Any]) -> str:
    """What a step learned from: reward, and how far the teacher is."""
    distance = f"  teacher KL {step['teacher_kl']:.4f}" if "teacher_kl" in step else ""
    return f"reward {step['reward']:.3f}{distance}"


def _pace(step: Mapping[str, Any], what: str, side: str) -> str:
    return f"{step[f'{what}_tokens_per_s']:,.0f} tok/s, idle {step[f'{side}_idle']:.0%}"


def elapsed_s(records: list[dict[str, Any]]) -> float:
    """Seconds of training by all processes that wrote these records: `elapsed_s` starts again in each."""
    total = last = 0.0
    for now in (r["elapsed_s"] for r in records if "elapsed_s" in r):
        total += last if now < last else 0.0
        last = now
    return total + last


def summary(records: list[dict[str, Any]], audit: Audit, *, seconds: float) -> Table:
    """The table a run ends with; `seconds`: of all its processes."""
    steps = [r for r in records if r["kind"] == "step"]
    tests = [r for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    table = Table(title="run", show_header=False)
    if tests:
        first, last = tests[0], tests[-1]
        table.add_row(
            "test accuracy", f"{first['accuracy']:.3f} → {last['accuracy']:.3f} ({last['num_prompts']} prompts)"
        )
    if steps:
        window = max(1, min(10, len(steps) // 2))  # the two never share a step of a run with more than one
        which = f"first {window} → last {window} steps" if window > 1 else "first → last step"
        for name, label, form in (("reward", "reward", ".3f"), ("teacher_kl", "teacher KL, nats", ".4f")):
            if name in steps[0]:
                first_mean, last_mean = _mean(steps[:window], name), _mean(steps[-window:], name)
                table.add_row(f"{label}, {which}", f"{first_mean:{form}} → {last_mean:{form}}")
    ages: Counter[int] = Counter()
    for record in steps:
        ages.update({int(age): n for age, n in record["token_staleness"].items()})
    total = max(1, sum(ages.values()))
    table.add_row("wall-clock", f"{seconds:.1f} s")
    table.add_row("optimizer steps", str(len(steps)))
    table.add_row("tokens trained", f"{sum(ages.values()):,}")
    table.add_row("token staleness", "  ".join(f"{age}: {ages[age] / total:.1%}" for age in sorted(ages)))
    paced = [r for r in steps if "learner_idle" in r]  # a redone step has no pace of its own
    if paced:
        idle = f"learner {_mean(paced, 'learner_idle'):.0%}, engines {_mean(paced, 'engine_idle'):.0%}"
        table.add_row("idle", idle)
    table.add_row("samples", _fates(audit))
    table.add_row("ledger", "adds up" if audit.ok else "; ".join(audit.violations))
    return table


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return sum(r[name] for r in records) / len(records)


def _fates(audit: Audit) -> str:
    counts = audit.samples
    return (
        f"issued {audit.samples_issued:,} = trained {counts['trained']:,} + masked {counts['masked']:,} "
        f"+ dropped {counts['dropped']:,} + in flight {audit.samples_in_flight:,}"
    )


def derived_table(config: RunConfig) -> Table:
    """The quantities that follow from the settings."""
    table = Table(title="derived", show_header=False)
    for name, value in config.derived.items():
        table.add_row(name, f"{value:,}")
    return table
