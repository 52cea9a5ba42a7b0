"""The sections of a run's settings, one class a table of the TOML file; a docstring under every key."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.errors import HeadwayError

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""At most eleven days: a socket cannot wait longer than 24."""


class ConfigError(HeadwayError, ValueError):
    """A setting is wrong; the message names it and the mend."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = "tiny:0.4m"
    """`tiny:0.4m`, `tiny:3m`, the same with `-wide`, or `tiny:moe` (built here, cold-started on the task), a directory,
    or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward passes compute in. auto: float32 on CPU, bfloat16 on CUDA; master weights are always float32."""
    cold_start_accuracy: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Tiny models only: supervised training before the run stops once validation accuracy reaches this."""


class TaskConfig(Section):
    name: str = "addition"
    """`addition`, `gsm8k`, `calculator`, `reasoning_gym:<task>`, or your own `package.module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task, such as `digits = 2`."""
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Mean seconds, long-tailed, that a sleeping tool adds to every turn: a stand-in for a network call."""
    num_workers: Natural = 0
    """Processes that judge the answers, for graders that compute or may block; 0: the run's own process judges."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of training rollouts; the learner computes its log-probs at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1 the ratio is biased: the engine samples from a cut support. The kept mass is logged."""
    top_k: Natural = 0
    """0 keeps the whole vocabulary; the same bias as top_p."""
    max_response_tokens: Positive = 8
    """Limit of one episode, tool output included."""
    max_turns: Positive = 1
    """Limit of turns the policy takes in one episode."""


class EngineConfig(Section):
    num_engines: Positive = 1
    """Engine processes."""
    num_slots: Positive = 64
    """Sequences one engine decodes together."""
    max_length: Positive = 512
    """Longest prompt + response, in tokens."""
    num_threads: Positive = 1
    """CPU threads of each engine."""
    device: str = "auto"
    """auto: cuda if there is one, else cpu. `cuda` shares out the GPUs that the learner leaves, see docs/scale.md;
    `cuda:1` is the GPU of every engine."""
    on_update: Literal["keep", "recompute", "interrupt"] = "keep"
    """New weights in flight: keep the KV cache, recompute it, or hand partial responses back and continue them."""
    logprobs: bool = True
    """Whether the engine returns behavior log-probs and entropy; false only for methods that need none."""
    round_weights: Literal["none", "bfloat16", "int8"] = "none"
    """Round parameters before serving: a forced train–inference discrepancy, for experiments."""
    max_restarts: Natural = 5
    """Restarts of one engine in a row, without it taking a new version in between, after which the run stops."""
    update_patience_s: Seconds = 5.0
    """How long the next version waits for engines that are slower than the first to take this one. They go on with the
    one they have, within the bound, and skip to the newest as they can."""
    stall_s: Seconds = 15.0
    """An engine silent for this long gets no requests until it answers, and others are asked for those it has."""
    update_timeout_s: Seconds = 120.0
    """An engine that does not take new weights within this is killed and restarted."""
    start_timeout_s: Seconds = 600.0
    """An engine that does not answer within this after its start counts as one that died."""
    python: str = ""
    """vllm and sglang: the Python of the environment they are installed in; empty takes Headway's own."""
    url: str = ""
    """vllm and sglang: join this server instead of starting one. It must read the run folder's files."""
    api_key_env: str = "HEADWAY_ENGINE_KEY"
    """Environment variable that holds the key of the server at `url`; a server started here gets a fresh key."""
    server_args: list[str] = []
    """vllm and sglang: more arguments for the server's command line, such as `["--tensor-parallel-size", "2"]`."""
    conformance_every: Natural | Literal["auto"] = "auto"
    """Updates between checks of the engines' log-probs against the learner's; 0 checks the first version only.
    auto: 1 for vllm and sglang, 0 for torch."""
    conformance_tolerance: Annotated[float, Field(ge=0)] = 0.0
    """Largest mean difference, in nats, such a check lets pass; 0: 0.005 in float32, 0.05 in bfloat16."""


class RolloutConfig(Section):
    attempts: Positive = 3
    """How often an episode is tried when its environment raises; then the group is dropped with the reason."""
    episode_timeout_s: Seconds = 600.0
    """An episode longer than this counts as a failed attempt."""
    max_ready_batches: Natural = 1
    """Whole batches that may wait for the learner before issuing pauses: fresher data where engines outrun it.
    0: only the bound limits, so that such data ages up to `max_staleness`."""


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] | Literal["law"] = 3e-4
    """Peak learning rate; `"law"` takes what the fitted law allows for this bound and this number of steps."""
    law: str = ""
    """A file of `headway law fit`; a rate above what it allows is lowered to it."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After warm-up, down to 0 at `num_steps`."""
    warmup_steps: Natural = 0
    """Steps over which the rate rises linearly from 0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient average."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the squared-gradient average."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's term in the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled decay, applied to matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient-norm clip."""
    vcpo_lr_scale: bool = False
    """Multiply the rate by sqrt(min(1, ESS/B)), ESS over the batch's response ratios capped at 8 (2602.17616): a batch
    whose responses the policy would hardly give any more takes a smaller step."""

    @property
    def peak(self) -> float:
        """The rate as a number. Raises ConfigError while it still says "law"."""
        if isinstance(self.lr, str):
            raise ConfigError('optimizer.lr = "law" needs optimizer.law, a file of `headway law fit`')
        return self.lr


class LearnerConfig(Section):
    num_ranks: Positive = 1
    """Processes that train together, each with its part of the parameters (FSDP2); on CUDA rank r takes device r.
    Results depend on it by rounding alone, so a run may be resumed with another number."""
    rank_timeout_s: Seconds = 600.0
    """A rank that owes the others its part longer than this ends the run, which can be resumed."""
    head: Literal["auto", "eager", "compiled", "eager_wide", "compiled_wide"] = "auto"
    """How log-probs are made from hidden states: tiles of 1,024 × 2,048 or (wide) 4,096 × 8,192, by plain or compiled
    operations. auto: eager on CPU; on CUDA the fastest on the run's own shapes, timed once and kept in the folder."""
    micro_batch_tokens: Positive = 8192
    """Most tokens, padding included, in one forward pass. Results do not depend on it, but for rounding and for sat and
    sat_gspo, whose quantile is that of each pass (as in the paper) unless `algorithm_params.scope = "batch"`."""
    num_threads: Positive = 1
    """CPU threads of the learner."""
    device: str = "auto"
    """auto: cuda if there is one, else cpu."""
    gradient_cosine: bool = True
    """Log cos(g_t, g_{t−1}); keeps one more float32 copy of the gradient, in memory and in checkpoints."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""


SERVERS = ("http://", "https://")
"""How the URL of a teacher begins; anything else is a model."""


class DistillConfig(Section):
    teacher: str = ""
    """Who teaches: `tiny:3m` (trained here), a directory, a hub id, or the URL of an OpenAI-compatible server that
    returns prompt log-probs, such as `http://127.0.0.1:8000`. Empty: no distillation."""
    method: str = "mc_recomputed"
    """A key of `headway.algorithms.DISTILLATIONS`."""
    params: dict[str, Any] = {}
    """Overrides of the method's defaults, such as `clip = [0.2, 0.2]`."""
    num_draws: Annotated[int, Field(gt=0, le=4096)] = 64
    """m, of the methods on draws: the token itself and m − 1 extra draws of the engine at each position."""
    top_k: Positive = 64
    """k, of the methods on the k most likely ids."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of the distillation loss."""
    reward_weight: Annotated[float, Field(ge=0)] = 0.0
    """Of the loss of `algorithm` beside it; 0 learns from the teacher alone."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Of the teacher's distribution."""
    teacher_accuracy: Annotated[float, Field(gt=0, lt=1)] = 0.97
    """Tiny teachers only: their supervised training stops once validation accuracy reaches this."""
    num_threads: Positive = 1
    """CPU threads of a local teacher."""
    device: str = "auto"
    """Of a local teacher. auto: cuda if there is one, else cpu."""
    batch_tokens: Positive = 8192
    """Most tokens, padding included, in one forward pass of a local teacher."""
    served_model: str = ""
    """Servers only: the name the teacher is served under."""
    tokenizer: str = ""
    """Servers only: directory or hub id of the teacher's tokenizer, which must be the student's own."""
    latency_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Seconds that every answer of the teacher is held back: a stand-in for a distant server."""
    timeout_s: Seconds = 120.0
    """A teacher that owes an answer this long is restarted, or asked again; nothing is lost but time."""
    max_failures: Positive = 10
    """Failures of the teacher in a row, after which the run stops; it can be resumed."""

    @property
    def is_remote(self) -> bool:
        return self.teacher.startswith(SERVERS)


class GuardConfig(Section):
    action: Literal["off", "warn", "lower_lr", "lower_staleness"] = "warn"
    """When signs of collapse stand: say so, halve the learning rate, or halve the bound."""
    window: Positive = 10
    """Steps that a sign is averaged over."""
    cosine: float = 0.5
    """Sign: mean cos(g_t, g_{t−1}) above this (2607.01083)."""
    ess: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Sign: mean effective share of tokens below this."""
    k3: Annotated[float, Field(ge=0)] = 0.1
    """Sign: mean k3 of behavior and current policy above this, nats."""
    budget: Annotated[float, Field(ge=0)] = 0.0
    """Sign: max_staleness · learning rate above this; `optimizer.law` sets it. 0: no such sign."""


class EvaluationConfig(Section):
    every: Natural = 20
    """Steps between evaluations on the validation split; 0 evaluates on the test split at start and end only."""
    size: Positive = 200
    """Validation prompts an evaluation asks, greedily."""
    test_size: Natural = 400
    """Test prompts asked at the start and at the end; 0 skips both."""


class CheckpointConfig(Section):
    every: Positive = 50
    """Steps between checkpoints; the ledger carries what happened since."""
    keep: Positive = 2
    """How many of the newest to keep."""


class EwmaConfig(Section):
    window: Literal["max_staleness", "observed", "fixed"] = "max_staleness"
    """W of β = W/(W + 2): the bound, twice each batch's mean token staleness, or that of `decay`."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.889
    """β of window "fixed", and of algorithm "ppo_ewma", which never resets."""
    reset_below: Annotated[float, Field(ge=0, le=1)] = 0.9
    """The average restarts from the current parameters when the active fraction of a step falls below this."""


class RayConfig(Section):
    address: str = ""
    """Of the cluster, as `ray.init` takes it; empty: that of RAY_ADDRESS, else one is started on this machine."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Of the placement group that holds the run's servers: on few nodes, or on many."""
    place_timeout_s: Seconds = 60.0
    """How long servers wait for room in the cluster, at the start and after a node is lost."""


class ReportConfig(Section):
    timeline: bool = True
    """Keep `timeline.jsonl`: who worked and who waited, for the report."""
    profiles: bool = True
    """Count |δ| of every step by entropy and around version switches, for the report; training does not read it."""
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where metrics go besides `metrics.jsonl`; each is an extra of the same name."""
    project: str = "headway"
    """What wandb and trackio file the run under."""
