"""Sources of proximal log-probs in one process: what they agree on, and what they leave alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.protocols import ProximalSource
from headway.proximal.average_source import AverageSource, observed_window, window_of
from headway.proximal.averages import ParameterAverage
from headway.proximal.messages import ScoreRequest
from headway.proximal.model_source import ModelSource
from headway.proximal.pool import BoundaryMissed, InterruptSource, Pool
from headway.proximal.samples import MissingLogprobs
from headway.proximal.scorer import Piece, Scorer
from headway.proximal.server import Worker
from headway.proximal.snapshot_source import SnapshotSource
from headway.proximal.snapshots import SnapshotGone, SnapshotStore
from headway.training.learner import TorchLearner
from headway.training.objectives import PolicyObjective, ProximalRule
from headway.types import Batch, Completion, Group, Prompt, Response

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


def learner(
    algorithm: str = "decoupled_ppo",
    *,
    proximal: ProximalRule | None = None,
    params: dict[str, Any] | None = None,
    **more: Any,
) -> TorchLearner:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(CONFIG).eval()
    return TorchLearner(
        model,
        objective=PolicyObjective(algorithm, params or {}, proximal=proximal),
        temperature=1.0,
        learning_rate=lambda step: 1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_cosine=True,
        micro_batch_tokens=10_000,
        pad_id=0,
        autocast=torch.float32,
        save_model=model.save_pretrained,
        **more,
    )


def scorer(one: TorchLearner, micro_batch_tokens: int = 64) -> Scorer:
    return Scorer(one.model, temperature=1.0, micro_batch_tokens=micro_batch_tokens, autocast=torch.float32)


def group(group_id: int, versions: list[int], seed: int = 0) -> Group:
    """Two responses whose tokens were sampled by these versions, with a tool token (−1) where one says so."""
    rng = np.random.default_rng(seed + group_id)
    prompt = Prompt(group_id, "train", rng.integers(1, 20, 3).astype(np.int32))
    ages = np.array(versions, np.int32)
    responses = tuple(
        Response(
            token_ids=rng.integers(1, 20, len(ages)).astype(np.int32),
            mask=ages >= 0,
            versions=ages,
            reward=float(member),
            behavior_logprobs=np.where(ages >= 0, rng.normal(-3, 0.1, len(ages)), 0).astype(np.float32),
        )
        for member in range(2)
    )
    return Group(group_id, prompt, responses)


def batch(step: int, versions: list[int]) -> Batch:
    return Batch(step, step, (group(2 * step, versions), group(2 * step + 1, versions)))


def advance(one: TorchLearner, source: ProximalSource, given: Batch) -> Batch:
    """One step as the loop takes it."""
    completed = source.complete(given)
    one.accumulate(completed)
    source.before_step(given.policy_version)
    source.after_step(completed, one.step())
    return completed


def snapshots(one: TorchLearner, directory: Path) -> SnapshotSource:
    return SnapshotSource(scorer(one), SnapshotStore(directory), max_staleness=2, parameters=one.weights)


def scores(completed: Batch) -> np.ndarray:
    return np.concatenate([r.proximal_logprobs for r in completed.responses])  # pyright: ignore[reportCallIssue, reportArgumentType]


@torch.no_grad()
def exact(parameters: list[dict[str, torch.Tensor]], given: Batch) -> np.ndarray:
    """Each token under a fresh model with the parameters of its version, one whole sequence at a time."""
    model = Qwen3ForCausalLM(CONFIG).eval()
    found = [np.zeros(len(response.token_ids), np.float32) for response in given.responses]
    for version, theirs in enumerate(parameters):
        model.load_state_dict(theirs, strict=False)
        model.tie_weights()
        for row, (prompt, response) in zip(found, prompted(given), strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response.token_ids])).long()
            every = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
            chosen = every.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            row[:] = np.where(response.versions == version, chosen, row)
    return np.concatenate(found)


def prompted(given: Batch) -> list[tuple[np.ndarray, Response]]:
    """Each response with its prompt's tokens."""
    return [(each.prompt.token_ids, response) for each in given.groups for response in each.responses]


def copied(one: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.weights().items()}


def test_the_three_exact_routes_agree_token_by_token(tmp_path: Path):
    last = batch(2, [0, 0, -1, 1, 2, 2])
    one = learner()
    kept, taken = snapshots(one, tmp_path / "a"), []
    pool = Pool()
    pooled = InterruptSource(scorer(one), pool, seed_of=lambda group_id, member: 10 * group_id + member)
    worker = ModelSource(
        InProcess(one, tmp_path / "b"),
        SnapshotStore(tmp_path / "b"),
        max_staleness=2,
        policy_version=0,
        parameters=one.weights,
    )
    for step in range(2):
        taken.append(copied(one))
        generate(pool, last, up_to=step)
        given = batch(step, [step] * 4)
        completed = kept.complete(given)
        one.accumulate(completed)
        kept.before_step(step)
        pooled.before_step(step)
        report = one.step()
        kept.after_step(completed, report)
        worker.after_step(completed, report)
    taken.append(copied(one))
    generate(pool, last, up_to=2)
    assert not torch.equal(taken[0]["model.norm.weight"], taken[2]["model.norm.weight"])
    wanted = exact(taken, last)
    for source in (kept, worker, pooled):
        np.testing.assert_allclose(scores(source.complete(last)), wanted, atol=2e-6)
    worker.close()


class InProcess:
    """The worker without its process."""

    def __init__(self, one: TorchLearner, directory: Path) -> None:
        self._worker = Worker(scorer(one), SnapshotStore(directory))

    def score(self, version: int, pieces: Any) -> Any:
        request = ScoreRequest(0, version, [p.token_ids for p in pieces], [p.wanted for p in pieces])
        answer = self._worker.answer(request)
        return answer.logprobs, answer.seconds

    def close(self) -> None: ...


def generate(pool: Pool, given: Batch, up_to: int) -> None:
    """What engines hand back of the batch's responses when they are interrupted at the end of a version."""
    for each in given.groups:
        for member, response in enumerate(each.responses):
            made = np.flatnonzero(response.versions == up_to)
            before = np.concatenate([each.prompt.token_ids, response.token_ids[: made[0]]])
            pool.sampled(
                10 * each.group_id + member,
                before,
                Completion(response.token_ids[made], response.versions[made], "interrupt"),
            )


def test_a_swap_shows_in_the_twin_alone_and_a_step_shows_in_it():
    one = learner()
    piece = Piece(np.array([3, 4, 5], np.int32), np.array([False, True, True]))
    twin = scorer(one)
    (before,) = twin.score([piece])
    zeros = {name: torch.zeros_like(t) for name, t in one.weights().items()}
    (uniform,) = twin.score([piece], zeros)
    np.testing.assert_allclose(uniform, [0, -np.log(20), -np.log(20)], rtol=1e-6)
    np.testing.assert_array_equal(twin.score([piece])[0], before)
    one.train(batch(0, [0, 0, 0]))
    assert not np.array_equal(twin.score([piece])[0], before)


def test_the_store_keeps_the_window_and_says_what_is_gone(tmp_path: Path):
    store = SnapshotStore(tmp_path)
    for version in range(5):
        store.keep(version, {"a": torch.full((3,), float(version))})
    store.keep(4, {"a": torch.zeros(3)})
    assert store.read(4)["a"].tolist() == [4.0] * 3
    store.forget_before(3)
    assert store.versions() == [3, 4]
    with pytest.raises(SnapshotGone, match="version 2"):
        store.read(2)
    (tmp_path / "version-000003.safetensors").write_bytes(b"cut")
    with pytest.raises(SnapshotGone, match="version 3"):
        store.read(3)


def test_a_token_whose_version_is_gone_is_named(tmp_path: Path):
    one = learner()
    source = InterruptSource(scorer(one), Pool(), seed_of=lambda g, m: g * 10 + m)
    with pytest.raises(MissingLogprobs, match=r"group 6, member 0: 1 tokens .* version 2"):
        source.complete(batch(3, [2, 3, 3]))


def test_the_pool_forgets_a_failed_attempt_and_keeps_tool_output_unscored():
    one, pool = learner(), Pool()
    first = Completion(np.array([7, 8], np.int32), np.array([0, 0], np.int32), "interrupt")
    prompt = np.array([1, 2, 3], np.int32)
    pool.sampled(5, prompt, first)
    pool.sampled(5, prompt, first)  # again from the prompt: the first attempt failed
    pool.score(scorer(one), 0)
    pool.sampled(
        5, np.array([1, 2, 3, 7, 8, 9], np.int32), Completion(np.array([4], np.int32), np.array([1], np.int32), "stop")
    )
    sample = pool.sample(5)
    assert sample is not None
    assert sample.versions.tolist() == [-1, -1, -1, 0, 0, -1, 1]
    assert np.isnan(sample.scores).tolist() == [True, True, True, False, False, True, True]
    with pytest.raises(BoundaryMissed, match="version 1"):
        pool.sampled(5, sample.token_ids, Completion(np.array([4], np.int32), np.array([2], np.int32), "stop"))
        pool.score(scorer(one), 2)


def test_a_response_that_ends_while_it_is_scored_is_handed_over_with_its_scores(monkeypatch: pytest.MonkeyPatch):
    pool, scoring = Pool(), scorer(learner())
    ended = batch(1, [0, 0]).groups[0]
    prompt, response = ended.prompt.token_ids, ended.responses[0]
    pool.sampled(5, prompt, Completion(response.token_ids, response.versions, "stop"))
    score = scoring.score

    def end_meanwhile(*args: Any) -> Any:
        stored = pool.finished(5, 6, 0, prompt, response)
        assert stored.proximal_logprobs is not None and np.isnan(stored.proximal_logprobs).all()
        return score(*args)

    monkeypatch.setattr(scoring, "score", end_meanwhile)
    _, (again,) = pool.score(scoring, 0)
    assert (again.group_id, again.member) == (6, 0)
    assert again.response.proximal_logprobs is not None and np.isfinite(again.response.proximal_logprobs).all()


def test_an_average_source_follows_the_golden_recurrence_and_survives_a_resume(tmp_path: Path):
    straight, resumed = learner("decoupled_ppo"), learner("decoupled_ppo")
    sources = [
        AverageSource(scorer(one), window=3.0, reset_below=0.0, parameters=one.weights) for one in (straight, resumed)
    ]
    wanted = ParameterAverage(window=3.0)
    wanted.update(copied(straight))
    for step in range(2):
        for one, source in zip((straight, resumed), sources, strict=True):
            advance(one, source, batch(step, [step] * 4))
        wanted.update(copied(straight))
    sources[1].save(tmp_path)
    after = AverageSource(scorer(resumed), window=3.0, reset_below=0.0, parameters=resumed.weights)
    after.load(tmp_path)
    one, two = sources[0].complete(batch(2, [1, 2, 2])), after.complete(batch(2, [1, 2, 2]))
    np.testing.assert_array_equal(scores(one), scores(two))
    for name, tensor in wanted.parameters.items():
        assert torch.equal(sources[0].parameters[name], tensor)


@pytest.mark.parametrize(("reset_below", "resets"), [(1.1, 1.0), (0.0, 0.0)])
def test_an_average_restarts_when_too_few_tokens_are_active(reset_below: float, resets: float):
    one = learner()
    source = AverageSource(scorer(one), window=4.0, reset_below=reset_below, parameters=one.weights)
    completed = source.complete(batch(0, [0] * 4))
    one.accumulate(completed)
    metrics = source.after_step(completed, one.step())
    assert metrics["proximal_reset"] == resets
    assert torch.equal(source.parameters["model.norm.weight"], one.weights()["model.norm.weight"]) == bool(resets)


def test_windows_are_configured_observed_or_fixed():
    assert window_of("max_staleness", max_staleness=4, decay=0.5) == 4
    assert window_of("observed", max_staleness=4, decay=0.5) is None
    window = window_of("fixed", max_staleness=4, decay=0.889)
    assert window is not None and window / (window + 2) == pytest.approx(0.889)
    assert observed_window(batch(3, [1, 2, 3, -1])) == pytest.approx(2.0)


@pytest.mark.parametrize(("source", "expected"), [("behavior", 0.0), ("loglinear", 0.5)])
def test_sources_without_a_pass_work_at_loss_time(source: str, expected: float):
    from headway.algorithms.proximal import AT_LOSS_TIME

    one = learner("decoupled_ppo", proximal=AT_LOSS_TIME[source])
    one._policy_version = 1
    metrics = one.train(Batch(1, 1, (group(0, [0, 0, 0]), group(1, [0, 0, 0])))).metrics
    whole = metrics["mean_abs_delta"]
    assert metrics["mean_abs_log_rd"] == pytest.approx(expected * whole, rel=1e-4)
    assert metrics["mean_abs_log_rs"] == pytest.approx((1 - expected) * whole, rel=1e-4)
