"""A run's settings: one TOML file, every key explained, nothing unknown accepted.

Few knobs are set, the rest is derived and printed before the start (`RunConfig.derived`).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError, model_validator

from headway.config_errors import explain
from headway.config_sections import (
    CheckpointConfig,
    ConfigError,
    DistillConfig,
    EngineConfig,
    EvaluationConfig,
    EwmaConfig,
    GuardConfig,
    LearnerConfig,
    ModelConfig,
    Natural,
    OptimizerConfig,
    Positive,
    RayConfig,
    ReportConfig,
    RolloutConfig,
    SamplingConfig,
    Seconds,
    Section,
    TaskConfig,
)
from headway.errors import nearest
from headway.staleness import OverBound, capacity

S = TypeVar("S", bound=Section)


class RunConfig(Section):
    """Everything a run is made of."""

    algorithm: str = "grpo"
    """A key of `headway.algorithms.ALGORITHMS`."""
    algorithm_params: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    """Overrides of the algorithm's defaults, such as `eps_high = 0.28`."""
    proximal: Literal[
        "train_start", "behavior", "loglinear", "exact_snapshot", "exact_model", "exact_interrupt", "ewma"
    ] = "train_start"
    """Who stands for π_old in the methods that split the ratio in two; docs/old-logits.md helps to choose."""
    behavior_entropy: Literal["engine", "topk_lower_bound", "learner"] = "engine"
    """Entropy of the policy that sampled, for methods that need it: exact from the `engine`, a lower bound from the
    engine's top log-probs, or that of the `learner`'s current policy in its place. The last two log their error."""
    behavior_entropy_top: Positive = 20
    """k, the most likely tokens reported at each position for `topk_lower_bound`."""
    max_staleness: Natural = 4
    """S: no token trains more than this many versions after it was sampled. 0 is synchronous training."""
    exact_lag: bool = False
    """Train every batch on data sampled exactly max_staleness versions ago (fewer at the start): for studies, where
    staleness is to be a controlled variable. Engines then wait for each other's last response at every version, and
    rollout.max_ready_batches has no effect."""
    over_bound: OverBound = "wait"
    """`wait` for slow samples, `drop` their group, or `mask` their tokens."""
    batch_size: Positive = 256
    """Responses one optimizer step trains on."""
    group_size: Positive = 8
    """Responses to each prompt."""
    num_steps: Positive = 240
    """Optimizer steps, the one stop rule of synchronous and asynchronous runs."""
    seed: Natural = 0
    """Of prompt order, sampling and tiny-model initialization."""
    engine: Literal["torch", "vllm", "sglang"] = "torch"
    """What generates: the built-in engine, or a server of vLLM or SGLang; see docs/engines.md."""
    runtime: Literal["local", "ray"] = "local"
    """Who starts engines, ranks, teacher and old-logit worker: this process on its own machine, or Ray on the nodes of
    a cluster; see docs/scale.md."""
    weights: Literal["memory", "disk", "delta", "collective"] = "memory"
    """How parameters reach the engines: shared memory, files, differences from version to version, or a broadcast of
    torch.distributed; see docs/scale.md."""
    routing_replay: bool = False
    """R3 (2510.11370), for mixtures of experts: the learner takes the experts the engine recorded, token by token."""
    record: bool = False
    """Keep every batch, so that `headway replay` can retrain the run bit by bit."""
    wait_limit_s: Seconds = 30.0
    """A wait longer than this is reported: who waits for whom, since when, and which knob changes it."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    engines: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    ewma: EwmaConfig = EwmaConfig()
    distill: DistillConfig = DistillConfig()
    guard: GuardConfig = GuardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _lag_is_kept(self) -> Self:
        if self.exact_lag and (self.over_bound != "wait" or self.guard.action == "lower_staleness"):
            raise ValueError(
                'exact_lag needs over_bound = "wait" and a guard.action other than "lower_staleness": nothing may '
                "change the lag"
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            low = self.batch_size // self.group_size * self.group_size
            fitting = " or ".join(str(n) for n in (low, low + self.group_size) if n)
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}; "
                f"set batch_size to {fitting}"
            )
        return self

    @property
    def learns_from_reward(self) -> bool:
        """Whether `algorithm` is used at all."""
        return not self.distill.teacher or self.distill.reward_weight > 0

    @property
    def label(self) -> str:
        """What is trained with, for people and folder names."""
        parts = [self.algorithm] if self.learns_from_reward else []
        return "+".join([*parts, self.distill.method] if self.distill.teacher else parts)

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.group_size

    @property
    def derived(self) -> dict[str, int]:
        """What follows from the knobs; printed before the start."""
        groups = capacity(self.max_staleness, self.groups_per_step)
        return {
            "responses per step": self.batch_size,
            "groups per step": self.groups_per_step,
            "capacity, groups": groups,
            "capacity, responses": groups * self.group_size,
            "most response tokens in flight": groups * self.group_size * self.sampling.max_response_tokens,
            "decoding slots, all engines": self.engines.num_engines * self.engines.num_slots,
            "responses in the run": self.num_steps * self.batch_size,
        }

    def to_toml(self) -> str:
        """The resolved settings; `parse_config` reads them back to an equal object."""
        return tomli_w.dumps(self.model_dump())


def with_head(config: RunConfig, head: str) -> RunConfig:
    """The settings with another `learner.head`. Raises ConfigError."""
    return parse_config(config.model_dump() | {"learner": config.learner.model_dump() | {"head": head}})


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (None: the defaults) and apply `key=value` overrides, keys dotted. Raises ConfigError."""
    values = read_toml(path) if path is not None else {}
    for override in overrides:
        _apply(values, override)
    return parse_config(values)


def read_toml(path: Path) -> dict[str, Any]:
    """Its tables. Raises ConfigError where there is no such file or it is not TOML."""
    if not path.is_file():
        raise ConfigError(f"no config file at {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check nested settings of a run. Raises ConfigError naming every wrong key, the nearest right one, and why."""
    return parse_section(RunConfig, values)


def parse_section(section: type[S], values: Mapping[str, Any]) -> S:
    """The same for any section."""
    unknown = _unknown_keys(section, values)
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, section)) from error


def _unknown_keys(section: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    complaints = []
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            known = [prefix + name for name in section.model_fields]
            complaints.append(f"unknown key {prefix + key!r}; {nearest(prefix + key, known)}")
        elif _is_section(field.annotation) and isinstance(value, Mapping):
            complaints += _unknown_keys(field.annotation, value, f"{prefix}{key}.")  # pyright: ignore[reportArgumentType]
    return complaints


def _is_section(annotation: Any) -> bool:
    return get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Section)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set algorithm=estr
    assign(values, key, value, where=f"--set {override}")


def assign(values: dict[str, Any], key: str, value: Any, *, where: str) -> None:
    """Put a value under a dotted key of nested tables, in place. Raises ConfigError, beginning with `where`."""
    *tables, name = (part.strip() for part in key.split("."))
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {table!r} is a value, not a table")
    values[name] = value
