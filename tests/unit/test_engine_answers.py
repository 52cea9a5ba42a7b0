"""What vLLM and SGLang answer, as their adapters take it: nonsense loses the engine by name, never the run."""

import asyncio
import base64
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import wire
from headway.engine import sglang
from headway.engine.http import BadAnswer, parsed, structured
from headway.engine.remote import RemoteEngine
from headway.engine.sampler import Sampled
from headway.engine.sglang import SglangEngine
from headway.engine.sglang_weights import Size, Told
from headway.engine.vllm import Hello, VllmEngine
from headway.protocols import EngineDied, NotFinite
from headway.rollout.transcript import check_completion
from headway.types import Completion, Sampling, WeightRef

PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = Sampling(max_tokens=2, top_k=5, num_draws=1)
TOKENS = np.array([4, 5], np.int32)
RECORD = {
    "token_ids": TOKENS,
    "logprobs": np.array([-0.5, -1.0], np.float32),
    "entropy": np.array([0.5, 1.0], np.float32),
    "kept_mass": np.array([0.9, 0.8], np.float32),
    "draw_ids": TOKENS[:, None],
    "draw_logprobs": np.array([[-0.5], [-1.0]], np.float32),
}
OPTIONS: dict[str, Any] = {
    "key": "k",
    "name": "e",
    "vocab_size": 9,
    "max_slots": 2,
    "max_length": 9,
    "expected": {},
    "timeout_s": 5.0,
}

Post = Callable[[str, Any], Any]


def vllm(post: Post) -> VllmEngine:
    engine: Any = VllmEngine("http://127.0.0.1:9", **OPTIONS)
    return answering(engine, post)


def answering(engine: Any, post: Post) -> Any:
    async def answer(path: str, body: Any = None) -> Any:
        return post(path, body)

    engine._http.post = answer
    return engine


def choice(**changes: Any) -> dict[str, Any]:
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}]
    return {"token_ids": TOKENS.tolist(), "finish_reason": "length", "weight_versions": spans} | changes


def server(text: Callable[[bytes], Any], **changes: Any) -> Post:
    """A server of vLLM that answers one choice, and `text(record)` when asked for the plugin's records."""

    def post(path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            return {"choices": [choice(**changes)]}
        (id,) = json.loads(body["args"][0])
        return {"results": [text(wire.encode({id: RECORD}))]}

    return post


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ask(engine: RemoteEngine, sampling: Sampling = SAMPLING) -> Completion:
    return asyncio.run(engine.generate(PROMPT, sampling))


def test_a_whole_answer_is_a_completion():
    answer = ask(vllm(server(base64_of)))
    assert answer.token_ids.tolist() == [4, 5] and answer.versions.tolist() == [0, 1]
    assert answer.side.draw_ids is not None and answer.side.draw_ids.tolist() == [[4], [5]]


@pytest.mark.parametrize("text", ["é", "a", "!!", None, 3, [1], ""])
def test_records_that_are_no_base64_of_msgpack_lose_the_engine(text: Any):
    with pytest.raises(EngineDied, match=r"engine 'e' at http.* is lost: headway_take"):
        ask(vllm(server(lambda record: text)))


@pytest.mark.parametrize("name", sorted(RECORD))
@pytest.mark.parametrize("how", ["short", "flat", "absent"])
def test_a_record_whose_columns_do_not_cover_the_tokens_loses_the_engine(name: str, how: str):
    changed: dict[str, Any] = {"short": RECORD[name][:1], "flat": RECORD[name][0], "absent": None}

    def text(record: bytes) -> str:
        fields = {field: changed[how] if field == name else value for field, value in RECORD.items()}
        (id,) = wire.decode(record, dict[str, Any])
        return base64_of(wire.encode({id: {k: np.asarray(v) for k, v in fields.items() if v is not None}}))

    with pytest.raises(EngineDied, match="is lost"):
        ask(vllm(server(text)))


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "0", "start": 0, "end": 1}],
        [{"version": "0", "start": 0, "end": 10**9}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "0", "start": 1, "end": 2}],
    ],
)
def test_versions_that_do_not_cover_the_tokens_or_go_backwards_lose_the_engine(spans: Any):
    with pytest.raises(EngineDied, match="weight versions"):
        ask(vllm(server(base64_of, weight_versions=spans)))


def test_the_salt_of_cached_prefixes_is_of_one_client_and_one_version():
    salts: list[str] = []

    def post(path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            salts.append(body["cache_salt"])
        return server(base64_of)(path, body)

    first, second = vllm(post), vllm(post)
    for engine, version in ((first, 0), (first, 0), (first, 1), (second, 1)):
        engine.version = version
        ask(engine)
    assert salts[0] == salts[1] and len(set(salts)) == 3


changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4)


def damage(whole: bytes, some: list[tuple[float, int]]) -> bytes:
    data = bytearray(whole)
    for place, value in some:
        data[int(place * len(data))] = value
    return bytes(data)


def damaged_json(answer: Any, some: list[tuple[float, int]]) -> Any:
    return parsed(damage(json.dumps(answer).encode(), some), "/x")


def sound(engine: RemoteEngine, sampling: Sampling) -> None:
    """What comes back keeps an engine's contract, or the engine is lost, or its model is said to be broken."""
    try:
        completion = ask(engine, sampling)
    except (EngineDied, NotFinite):
        return
    check_completion(completion, len(PROMPT), sampling.max_tokens, "e")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engine.remote.LOST_PAUSE_S", 0.0)


@settings(max_examples=100, deadline=None)
@given(changes, changes, changes)
def test_damaged_answers_of_vllm(of_choice: Any, of_record: Any, of_results: Any):
    whole = server(lambda record: base64_of(damage(record, of_record)))

    def post(path: str, body: Any) -> Any:
        return damaged_json(whole(path, body), of_choice if path == "/inference/v1/generate" else of_results)

    sound(vllm(post), SAMPLING)


def meta(**changes: Any) -> dict[str, Any]:
    scored = [[-0.5, 4, None], [-1.0, 5, None]]
    experts = base64_of(np.arange(4 * 2, dtype=np.int32).tobytes())
    top = {"output_token_logprobs": scored, "output_top_logprobs": [scored, scored], "routed_experts": experts}
    return {"finish_reason": {"type": "length"}, "weight_version": "0"} | top | changes


def sglang_at(place: Path, post: Post) -> SglangEngine:
    return answering(SglangEngine("http://127.0.0.1:9", model=place, place=place, num_layers=1, **OPTIONS), post)


@settings(max_examples=100, deadline=None)
@given(changes)
def test_damaged_answers_of_sglang(some: Any):
    answer = {"output_ids": TOKENS.tolist(), "meta_info": meta()}
    sampling = Sampling(max_tokens=2, num_top=2, record_routing=True)
    sound(sglang_at(Path(), lambda path, body: damaged_json(answer, some)), sampling)


@settings(max_examples=100, deadline=None)
@given(changes)
@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (Hello, {"tied": False, "vocab_size": 9, "max_length": 9, "dtype": "float32"}),
        (Told, {"success": True, "message": "m"}),
        (Size, {"tp_size": 2, "pp_size": 1, "dp_size": 1}),
    ],
)
def test_damaged_answers_about_a_server(kind: Any, answer: Any, some: Any):
    try:
        assert isinstance(structured(damaged_json(answer, some), kind), kind)
    except BadAnswer:
        return


def test_a_request_aborted_before_its_first_token_has_no_routing_and_goes_on():
    """SGLang has run nothing of it yet, so there are no experts to report."""
    nothing = {"output_ids": [], "meta_info": meta(finish_reason={"type": "abort"}, output_token_logprobs=[])}
    nothing["meta_info"] |= {"routed_experts": None, "output_top_logprobs": []}
    answers = iter([nothing, {"output_ids": TOKENS.tolist(), "meta_info": meta()}])
    engine = sglang_at(Path(), lambda path, body: next(answers))
    answer = ask(engine, Sampling(max_tokens=2, record_routing=True))
    assert answer.token_ids.tolist() == [4, 5]
    assert answer.side.routing is not None and len(answer.side.routing) == 5


def test_what_an_update_copies_and_removes_holds_up_no_other_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    threads: list[Any] = []

    def version_folder(*_: object) -> Path:
        threads.append(threading.current_thread())
        return tmp_path

    monkeypatch.setattr(sglang, "version_folder", version_folder)
    monkeypatch.setattr("headway.engine.remote.verified", lambda *_: None)
    engine = sglang_at(tmp_path, lambda path, body: {"success": True})
    asyncio.run(engine.update_weights(WeightRef(1, "x", "")))
    assert engine.version == 1 and threads != [threading.main_thread()]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of the adapter that runs inside vLLM, of which nothing is needed here but two names."""
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    names: Any = sys.modules["vllm.v1.sample.logits_processor"]
    names.LogitsProcessor, names.process_dict_updates = object, None
    monkeypatch.delitem(sys.modules, "headway.engine.vllm_plugin", raising=False)
    import headway.engine.vllm_plugin as plugin

    monkeypatch.delitem(sys.modules, "headway.engine.vllm_plugin")
    return plugin


def test_what_is_sampled_after_a_record_was_taken_is_not_kept(plugin: Any):
    records = plugin.Records()
    step = Sampled(torch.tensor([4, 5], dtype=torch.int32), torch.tensor([-1.0, -2.0]))
    records.add([("taken", 0), ("running", 0)], step)
    taken = records.take(["taken", "forgotten"])
    assert taken["taken"]["token_ids"].tolist() == [4] and taken["forgotten"] == {}
    for index in (1, 2):
        records.add([("taken", index), ("forgotten", index)], step)
        records.take([])
    assert len(records) == 1
    assert records.take(["running"])["running"]["token_ids"].tolist() == [5] and not len(records)


def test_only_so_many_requests_are_remembered_as_gone(plugin: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "NUM_REMEMBERED", 3)
    records = plugin.Records()
    for i in range(10):
        records.take([f"{i}"])
    assert list(records._gone) == ["7", "8", "9"]
