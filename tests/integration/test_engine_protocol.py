"""What every engine owes its callers, through `headway.protocols.Engine` alone: the built-in engine's process, vLLM (in
`make test-vllm`), and SGLang's adapter against a server made from its documentation, not yet against a real one."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import LONG, PLAIN, PROMPTS, ask_all, chosen, close_to, interrupted, same_tokens, under_way
from harness import MAX_LENGTH, Harness, build, make_harness
from tiny_models import VOCAB, greedy_by_transformers, logprobs_by_transformers

from headway.engine.hosting import Client
from headway.engine.messages import EngineSettings
from headway.protocols import RequestRefused, WeightsRefused
from headway.runtime.launch import SERVERS
from headway.types import Completion, Sampling

torch.set_num_threads(1)

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(
    scope="module", params=["torch", "sglang", "sglang-broadcast", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = make_harness(request.param, tmp_path_factory.mktemp(request.param))
    yield harness
    harness.close()


def test_greedy_tokens_equal_those_of_transformers_generate(engine: Harness):
    model = build()
    answers = engine.run(lambda c: ask_all(c, PROMPTS, Sampling(max_tokens=12, temperature=0.0)), model)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids.tolist() == greedy_by_transformers(model, prompt, 12)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_entropy_and_top_equal_a_transformers_forward(engine: Harness, temperature: float):
    model = build(seed=1)
    sampling = Sampling(max_tokens=15, seed=3, temperature=temperature, num_draws=5 * engine.has_draws, num_top=4)
    for prompt, answer in zip(PROMPTS, engine.run(lambda c: ask_all(c, PROMPTS, sampling), model), strict=True):
        full = logprobs_by_transformers(model, prompt, answer.token_ids, temperature)
        close_to(answer.logprobs, chosen(full, answer.token_ids))
        close_to(answer.side.top_logprobs, full.topk(4).values)
        if engine.has_entropy:
            close_to(answer.entropy, -(full.exp() * full).sum(-1))
        else:
            assert answer.entropy is None
        if engine.has_draws:
            assert answer.side.draw_ids.shape == (15, 5)
            close_to(answer.side.draw_logprobs, full.gather(-1, torch.from_numpy(answer.side.draw_ids).long()))


def test_truncated_logprobs_belong_to_the_truncated_distribution_or_are_refused(engine: Harness):
    model = build()
    sampling = Sampling(max_tokens=12, seed=1, temperature=0.9, top_p=0.8, top_k=10)
    if not engine.has_truncation:
        with pytest.raises(RequestRefused, match="top_p = 1"):
            engine.run(lambda c: ask_all(c, PROMPTS, sampling), model)
        return
    for prompt, answer in zip(PROMPTS, engine.run(lambda c: ask_all(c, PROMPTS, sampling), model), strict=True):
        full = logprobs_by_transformers(model, prompt, answer.token_ids, 0.9)
        kept = torch.from_numpy(answer.side.kept_mass)
        close_to(answer.logprobs, chosen(full, answer.token_ids) - kept.log())
        assert bool(((kept > 0) & (kept < 1)).all())


def test_tokens_depend_on_seed_and_position_alone(engine: Harness):
    model = build()
    sampling = replace(PLAIN, num_draws=2 * engine.has_draws)

    async def work(client: Client) -> None:
        together = await ask_all(client, PROMPTS, sampling)
        for i in reversed(range(len(PROMPTS))):
            same_tokens(await client.generate(PROMPTS[i], replace(sampling, seed=PLAIN.seed + i)), together[i])
        members = await ask_all(client, [PROMPTS[1]] * 6, PLAIN)
        assert len({tuple(m.token_ids.tolist()) for m in members}) == 6

    engine.run(work, model)


def test_a_stop_token_is_part_of_the_response_and_ends_it(engine: Harness):
    async def work(client: Client) -> None:
        tokens = (await client.generate(PROMPTS[0], PLAIN)).token_ids.tolist()
        stop = tokens[5]
        stopped = await client.generate(PROMPTS[0], replace(PLAIN, stop_token_ids=(VOCAB - 1, stop)))
        assert stopped.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert stopped.finish_reason == "stop"

    engine.run(work)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_in_flight_is_recorded_token_by_token(engine: Harness, on_update: str):
    if on_update == "keep" and not engine.keeps:
        on_update = "recompute"
    before, after = build(seed=0), build(seed=1)

    async def work(client: Client) -> tuple[Completion, Completion, int]:
        for _ in range(24):  # an update may come too early or too late on a busy machine
            undisturbed = await client.generate(PROMPTS[1], LONG)
            ref = engine.publish(after)
            pending = await under_way(client)
            await client.update_weights(ref)
            answer = await pending
            if answer.versions[0] < answer.versions[-1] == ref.version:
                return undisturbed, answer, ref.version
            await client.update_weights(engine.publish(before))
        raise AssertionError("no update came while a request was under way")

    undisturbed, answer, new = engine.run(work, before, on_update=on_update)
    at = int((answer.versions == new - 1).sum())
    assert answer.versions.tolist() == [new - 1] * at + [new] * (LONG.max_tokens - at)
    assert 0 < at < LONG.max_tokens
    assert answer.token_ids[:at].tolist() == undisturbed.token_ids[:at].tolist()
    full = logprobs_by_transformers(before, PROMPTS[1], answer.token_ids, PLAIN.temperature)
    close_to(answer.logprobs[:at], chosen(full, answer.token_ids)[:at])
    rest = chosen(logprobs_by_transformers(after, PROMPTS[1], answer.token_ids, PLAIN.temperature), answer.token_ids)
    distance = (torch.from_numpy(answer.logprobs[at:]) - rest[at:]).abs().max()
    assert (distance < 1e-4) == (on_update == "recompute")


def test_a_server_told_to_interrupt_hands_back_at_an_update_and_lets_in_under_the_new_version_only(engine: Harness):
    """The built-in engine, over every channel: test_update_interrupts.py."""
    if engine.kind not in SERVERS:
        assert engine.kind == "torch"
        return
    after = build(seed=1)

    async def work(client: Client) -> tuple[Completion, Any, Completion, int]:
        async def play(pending: "asyncio.Task[Completion]") -> tuple[Completion, Any, Completion]:
            partial = await pending
            longer = np.concatenate([PROMPTS[1], partial.token_ids])
            return partial, longer, await client.generate(longer, replace(PLAIN, max_tokens=10))

        for _ in range(24):  # an update may come too early or too late on a busy machine
            playing = asyncio.ensure_future(play(await under_way(client)))
            ref = engine.publish(after)
            await client.update_weights(ref)
            partial, longer, rest = await playing
            if partial.finish_reason == "interrupt" and len(partial.token_ids):
                return partial, longer, rest, ref.version
            await client.update_weights(engine.publish(build()))
        raise AssertionError("no update came while a request was under way")

    partial, longer, rest, new = engine.run(work, on_update="interrupt")
    assert set(partial.versions.tolist()) == {new - 1} and set(rest.versions.tolist()) == {new}
    full = logprobs_by_transformers(after, longer, rest.token_ids, PLAIN.temperature)
    close_to(rest.logprobs, chosen(full, rest.token_ids))


def test_a_prompt_after_an_update_meets_no_older_keys(engine: Harness):
    close_to(*after_an_update(engine))
    if engine.kind == "vllm":  # the one with a cache that outlives an update: without its salt this test must fail
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            close_to(*after_an_update(engine, unsalted))


def after_an_update(engine: Harness, tamper: Any = lambda client: None) -> tuple[Any, torch.Tensor]:
    """Log-probs of an answer to a prompt that was asked before an update too, and what they must be."""
    after = build(seed=1)
    prompt = np.arange(300, dtype=np.int32) % (VOCAB - 1) + 1  # blocks of prefix caches have up to 128 tokens

    async def work(client: Client) -> Completion:
        tamper(client)
        await ask_all(client, [prompt] * 2, PLAIN)
        await client.update_weights(engine.publish(after))
        return await client.generate(prompt, PLAIN)

    answer = engine.run(work)
    full = logprobs_by_transformers(after, prompt, answer.token_ids, PLAIN.temperature)
    return answer.logprobs, chosen(full, answer.token_ids)


def unsalted(client: Any) -> None:
    """Have a client of vLLM send the same salt whatever the version."""
    post = client._http.post

    async def send(path: str, body: Any = None) -> Any:
        return await post(path, body | {"cache_salt": "the same"} if body and "cache_salt" in body else body)

    client._http.post = send


def test_an_interrupted_request_continues_to_the_same_tokens(engine: Harness):
    async def work(client: Client) -> None:
        whole = await client.generate(PROMPTS[1], LONG)
        partial = await interrupted(client)
        n = len(partial.token_ids)
        assert partial.finish_reason == "interrupt" and 0 < n < LONG.max_tokens
        longer = np.concatenate([PROMPTS[1], partial.token_ids])
        rest = await client.generate(longer, replace(LONG, max_tokens=LONG.max_tokens - n))
        assert [*partial.token_ids, *rest.token_ids] == whole.token_ids.tolist()
        np.testing.assert_allclose(
            np.concatenate([partial.logprobs, rest.logprobs]),  # pyright: ignore[reportArgumentType, reportCallIssue]
            whole.logprobs,  # pyright: ignore[reportArgumentType]
            atol=5e-5,
        )

    engine.run(work)


def test_what_waits_for_a_slot_is_interrupted_with_nothing_and_an_update_may_follow_at_once(engine: Harness):
    async def work(client: Client) -> None:
        ref = engine.publish(build(seed=1))
        pending = [asyncio.ensure_future(client.generate(PROMPTS[1], LONG)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.gather(client.interrupt(), client.update_weights(ref))
        *_, waiting = await asyncio.gather(*pending)  # the first may have ended on a busy machine
        assert waiting.finish_reason == "interrupt" and not len(waiting.token_ids)
        answer = await client.generate(PROMPTS[0], PLAIN)
        assert set(answer.versions.tolist()) == {ref.version}

    engine.run(work, max_slots=1)


def test_cancelling_the_awaiter_frees_its_slot(engine: Harness):
    async def work(client: Client) -> None:
        expected = await client.generate(PROMPTS[1], PLAIN)
        running = asyncio.ensure_future(client.generate(PROMPTS[1], LONG))
        waiting = asyncio.ensure_future(client.generate(PROMPTS[1], LONG))
        await asyncio.sleep(0.05)
        for task in (running, waiting):
            task.cancel()
        async with asyncio.timeout(20):
            same_tokens(await client.generate(PROMPTS[1], PLAIN), expected)
        assert running.cancelled() and waiting.cancelled() and client.num_pending == 0

    engine.run(work, max_slots=1)


def test_an_urgent_request_takes_the_next_free_slot(engine: Harness):
    async def work(client: Client) -> list[str]:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await client.generate(PROMPTS[4], Sampling(max_tokens=60, priority=priority))
            order.append(name)

        running = asyncio.create_task(ask("running", 0))
        while not (await client.status()).num_active:  # it must hold the only slot before the others come
            await asyncio.sleep(0.001)
        await asyncio.gather(running, ask("waiting", 0), ask("waiting too", 0), ask("urgent", -1))
        return order

    assert engine.run(work, max_slots=1) == ["running", "urgent", "waiting", "waiting too"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], PLAIN, "one or more token ids"),
        ([1, VOCAB], PLAIN, f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([1] * MAX_LENGTH, PLAIN, f"max_length of {MAX_LENGTH}"),
        ([1], replace(PLAIN, temperature=float("nan")), "temperature"),
        ([1], replace(PLAIN, top_p=0.0), "top_p"),
        ([1], replace(PLAIN, num_top=VOCAB + 1), "num_top"),
        ([1], replace(PLAIN, stop_token_ids=(VOCAB,)), "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_the_others_go_on(
    engine: Harness, prompt: list[int], sampling: Sampling, message: str
):
    async def work(client: Client) -> tuple[Any, Any]:
        bad = client.generate(np.array(prompt, np.int32), sampling)
        return await asyncio.gather(client.generate(PROMPTS[0], PLAIN), bad, return_exceptions=True)

    good, bad = engine.run(work)
    assert len(good.token_ids) == 12
    assert isinstance(bad, RequestRefused) and message in str(bad)


def test_weights_that_did_not_arrive_whole_are_refused_and_the_previous_stay(engine: Harness):
    model = build()
    poisoned = model.state_dict()[NAME].clone()
    poisoned[3, 4] = torch.inf

    async def work(client: Client) -> None:
        expected = await client.generate(PROMPTS[0], PLAIN)
        for change in (None, poisoned.T.contiguous(), poisoned):
            with pytest.raises(WeightsRefused, match=NAME.replace(".", r"\.")):
                await client.update_weights(engine.publish(build(seed=1), **{NAME: change}))
        with pytest.raises(WeightsRefused, match="unexpected_name"):
            await client.update_weights(engine.publish(build(seed=1), unexpected_name=poisoned))
        torn = engine.publish(build(seed=1))
        content = bytearray(Path(torn.path).read_bytes())
        content[-5] ^= 0xFF
        Path(torn.path).write_bytes(content)
        for bad in (torn, replace(torn, path=torn.path + ".gone")):
            with pytest.raises(WeightsRefused, match=str(torn.version)):
                await client.update_weights(bad)
        answer = await client.generate(PROMPTS[0], PLAIN)
        same_tokens(answer, expected)
        assert answer.versions.tolist() == expected.versions.tolist()

    engine.run(work, model)


def test_an_engine_can_withhold_logprobs(engine: Harness):
    async def work(client: Client) -> Completion:
        return await client.generate(PROMPTS[0], PLAIN)

    bare = engine.run(work, record_logprobs=False)
    assert bare.logprobs is None and bare.entropy is None
    assert bare.token_ids.tolist() == engine.run(work).token_ids.tolist()


def test_a_wrong_key_is_refused(engine: Harness):
    async def work(client: Client) -> None:
        wrong: Any = client
        if engine.kind == "torch":
            wrong._dealer._token = b"wrong"
        else:
            wrong._http._key = "wrong"
        with pytest.raises(PermissionError):
            await wrong.generate(PROMPTS[0], PLAIN)

    engine.run(work)


def test_a_running_server_can_be_joined_where_the_kind_has_servers(engine: Harness, tmp_path: Path):
    if engine.kind not in SERVERS:
        assert engine.kind == "torch"
        return
    where: Any = engine.run(lambda client: asyncio.sleep(0, client))
    settings = EngineSettings(config=str(engine.model), max_slots=2, max_length=MAX_LENGTH)
    join, key = SERVERS[engine.kind][1], where._http._key
    host = join(settings, "engine-0", tmp_path / "engine-0.log", url=where.endpoint, key=key)

    async def work() -> Completion:
        await host.client.update_weights(engine.publish(build()))
        return await host.client.generate(PROMPTS[0], PLAIN)

    same_tokens(asyncio.run(work()), engine.run(lambda client: client.generate(PROMPTS[0], PLAIN)))


def test_the_status_counts_what_was_sampled(engine: Harness):
    async def work(client: Client) -> None:
        before = await client.status()
        await ask_all(client, PROMPTS, PLAIN)
        after = await client.status()
        assert after.num_tokens - before.num_tokens == 12 * len(PROMPTS)
        assert after.num_active == after.num_waiting == 0
        assert after.up_s > before.up_s and after.busy_s > before.busy_s

    engine.run(work)


def test_versions_never_go_backwards_over_many_updates(engine: Harness):
    models, sampling = [build(seed=s) for s in range(2)], replace(PLAIN, max_tokens=80)

    async def work(client: Client) -> list[Completion]:
        pending = [asyncio.ensure_future(client.generate(p, sampling)) for p in PROMPTS * 2]
        for model in itertools.islice(itertools.cycle(models), 4):
            await asyncio.sleep(0.03)
            await client.update_weights(engine.publish(model))
        return await asyncio.gather(*pending)

    for answer in engine.run(work):
        assert len(answer.token_ids) == sampling.max_tokens
        assert (np.diff(answer.versions) >= 0).all()
