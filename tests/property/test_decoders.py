"""Every decoder against bytes that nobody meant: the declared error comes out, and nothing else happens.

Bytes are wholly random, or a valid message with some bytes changed, cut or repeated, which gets past the first checks.
"""

import json
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway import wire
from headway.engine import messages, vllm
from headway.envs import messages as envs
from headway.errors import HeadwayError
from headway.ledger import Ledger, LedgerError
from headway.planner.law import Cell, Interval, Law
from headway.protocols import DeliveryFailed, RequestRefused, WeightsRefused
from headway.proximal.messages import Scored as WorkerScored
from headway.proximal.messages import ScoreRequest
from headway.report.jsonl import read_records
from headway.runtime import group
from headway.runtime.law import SweepError, read_law
from headway.runtime.recording import BundleError, read_batch, write_batch
from headway.runtime.run_folder import RunFolderError, _stored
from headway.teacher.http import BadAnswer, HttpTeacher, read_positions
from headway.teacher.messages import Score, Scored
from headway.types import Batch, Completion, EngineStatus, Group, Prompt, Response, Sampling, SideData, WeightRef
from headway.weights import DiskChannel, read_weights
from headway.weights.delta import DeltaChannel, apply_delta

IDS = np.array([3, 1, 4], np.int32)
LOGPROBS = np.array([-0.5, -1.0, -2.0], np.float32)
SIDE = SideData(draw_ids=IDS[:, None], draw_logprobs=LOGPROBS[:, None])
RESPONSE = Response(IDS, np.array([True, True, True]), np.zeros(3, np.int32), 1.0, LOGPROBS, -LOGPROBS, side=SIDE)
PROMPT = Prompt(0, "train", IDS, {"answer": "42"})
BATCH = Batch(0, 0, (Group(0, PROMPT, (RESPONSE, RESPONSE)),))
STATUS = EngineStatus(version=5, num_active=6, num_waiting=1, num_tokens=9, busy_s=8.1, up_s=9.0)
COMPLETION = Completion(IDS, np.zeros(3, np.int32), "stop", LOGPROBS, -LOGPROBS, SIDE)

RECORDS: list[tuple[Any, Any]] = [
    (messages.Submit(1, IDS, Sampling(max_tokens=4)), messages.Message),
    (messages.Update(1, WeightRef(5, "x", "9f")), messages.Message),
    (messages.Reply(STATUS, [messages.Finished(1, COMPLETION)], [messages.Failed(2, "E", "t")], [3]), messages.Reply),
    (Score(1, IDS, IDS[:, None], 2), Score),
    (Scored(1, None, "no"), Scored),
    (envs.Step(1, 7, True, "train", 3, "42"), envs.Asked),
    (envs.Judged(1, 0.5, "and?"), envs.Said),
    (ScoreRequest(1, 2, [IDS], [np.ones(3, bool)]), ScoreRequest),
    (WorkerScored(1, [LOGPROBS]), WorkerScored),
    (group.Accumulate(BATCH), group.Command),
    (group.Save("checkpoints/7"), group.Command),
    ({"e-1": vllm.Record(IDS, LOGPROBS, -LOGPROBS, draw_ids=IDS[:, None])}, dict[str, vllm.Record]),
    (RESPONSE, Response),
    (BATCH, Batch),
]

changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6)
few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


damage = st.tuples(
    changes, st.floats(0, 1), st.sampled_from(["as it is", "cut", "repeated", "noise"]), st.binary(max_size=400)
)


def suffered(whole: bytes, how: tuple[list[tuple[float, int]], float, str, bytes]) -> bytes:
    """`whole` with a few bytes changed, perhaps cut short, perhaps with a piece of itself put in once more."""
    some, where, kind, noise = how
    data = bytearray(whole)
    for place, value in some:
        data[int(place * len(data))] = value
    cut = int(where * len(data))
    if kind == "cut":
        return bytes(data[:cut])
    if kind == "repeated":
        return bytes(data[:cut] + data[cut // 2 :])
    return noise if kind == "noise" else bytes(data)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    return damage.map(lambda how: suffered(whole, how))


def holds(read: Callable[[], Any], *errors: type[Exception]) -> None:
    """Reading gives a value or one of these errors, and takes little memory."""
    tracemalloc.start()
    try:
        read()
    except errors:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize(("record", "kind"), RECORDS, ids=lambda value: type(value).__name__)
@few
@given(st.data())
def test_messages_and_stored_records(record: Any, kind: Any, data: st.DataObject):
    whole = wire.encode(record)
    wire.decode(whole, kind)
    some = data.draw(damaged(whole))
    holds(lambda: wire.decode(some, kind), msgspec.MsgspecError)


def array(name: str, shape: list[int], raw: bytes) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "Submit", "id": 1, "token_ids": [name, shape, raw], "sampling": {"max_tokens": 4}}
    )


@pytest.mark.parametrize(
    "message",
    [
        array("object", [1], b"\0" * 8),
        array("float32", [1], b"\0" * 4),
        array("int32", [-1, -1], b"\0" * 4),
        array("int32", [0, 2**63], b""),
        array("int32", [0, 2**40, 2**40], b""),
        array("int32", [1] * 100, b"\0" * 4),
        array("int32", [2], b"\0" * 4),
        msgspec.msgpack.encode({"type": "Submit", "id": 1, "token_ids": 0, "sampling": {}})[:-1] + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xa1\xff",
        b"\x81\xa4type\xa1\xff",
    ],
)
def test_arrays_that_lie_about_themselves(message: bytes):
    kind: Any = messages.Message
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(message, kind)
    holds(lambda: wire.decode(message, kind), msgspec.MsgspecError)


def test_a_mask_holds_nothing_but_0_and_1():
    """A byte of 2 would count as two tokens in a sum."""
    whole = wire.encode(ScoreRequest(1, 2, [], [np.array([True, False])]))
    with pytest.raises(msgspec.ValidationError, match="other than 0 and 1"):
        wire.decode(whole.replace(b"\xc4\x02\x01\x00", b"\xc4\x02\x02\x00"), ScoreRequest)


@few
@given(st.data())
def test_headers_of_weights(tmp_path: Path, data: st.DataObject):
    ref = DiskChannel(tmp_path).publish(7, {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)})
    some = data.draw(damaged(Path(ref.path).read_bytes()))
    Path(ref.path).write_bytes(some)
    # With the right checksum over the wrong bytes: what lies behind the checksum must hold too.
    forged = WeightRef(7, ref.path, xxhash.xxh3_64_hexdigest(some))
    holds(lambda: read_weights(forged), WeightsRefused)


@few
@given(st.data())
def test_differences_of_weights(tmp_path: Path, data: st.DataObject):
    held = {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(2)}
    channel = DeltaChannel(tmp_path, dtype=None, say=print)
    channel.publish(0, held)
    ref = channel.publish(1, {"w": held["w"] + torch.eye(30)[:20], "b": held["b"] * 1.01})
    assert torch.equal(apply_delta(ref, 0, held)["w"], held["w"] + torch.eye(30)[:20])
    some = data.draw(damaged(Path(ref.path).read_bytes()))
    Path(ref.path).write_bytes(some)
    forged = WeightRef(1, ref.path, xxhash.xxh3_64_hexdigest(some))
    holds(lambda: apply_delta(forged, 0, held), DeliveryFailed)


@pytest.mark.parametrize("header", [b"[" * 200_000, b'{"__metadata__": 3}', b'{"w": []}', b"{}", b"\xff"])
def test_headers_of_weights_that_make_no_sense(tmp_path: Path, header: bytes):
    path = tmp_path / "v7.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsRefused):
        read_weights(WeightRef(7, str(path), xxhash.xxh3_64_hexdigest(path.read_bytes())))


@few
@given(st.data())
def test_recorded_batches(tmp_path: Path, data: st.DataObject):
    write_batch(tmp_path, BATCH)
    path = tmp_path / "step-000000.msgpack"
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    holds(lambda: read_batch(tmp_path, 0), BundleError)


@few
@given(st.data())
def test_metrics(tmp_path: Path, data: st.DataObject):
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "step", "step": 0, "loss": 0.5}, {"kind": "evaluation", "split": "test", "accuracy": 0.5}]
    path.write_bytes(data.draw(damaged("".join(json.dumps(line) + "\n" for line in lines).encode())))
    holds(lambda: [record["kind"] for record in read_records(path)], HeadwayError)


@pytest.mark.parametrize("line", [b"3", b"[]", b'{"step": 3}', b'{"kind": "step"}', b'"\xff"', b"[" * 100_000])
def test_lines_of_metrics_that_are_no_records(tmp_path: Path, line: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "evaluation"}\n' + line + b"\n")
    with pytest.raises(HeadwayError, match="line 2,"):
        list(read_records(path))


@few
@given(st.data())
def test_scores_of_a_teacher_behind_http(data: st.DataObject):
    likely = {str(id): {"logprob": -1.0 - id, "decoded_token": "x"} for id in range(4)}
    whole = json.dumps({"choices": [{"prompt_logprobs": [None, likely, likely]}]}).encode()
    teacher: Any = HttpTeacher("http://h", model="m", key="", vocab_size=9, timeout_s=1, max_failures=1, say=print)
    teacher._post = lambda body: data.draw(damaged(whole))

    def read() -> None:
        scores = read_positions(teacher.ask([3, 1, 2], 2)[1:], IDS[1:] // 2, 2, 9)
        assert np.isfinite(scores.logprobs).all() and scores.top_ids is not None and (scores.top_ids < 9).all()

    holds(read, BadAnswer, RequestRefused)


@few
@given(st.data())
def test_fitted_laws(tmp_path: Path, data: st.DataObject):
    one = Interval(0.1, 0.05, None)
    law = Law(one, one, 3.0, 0.95, 4.0, 5.0, (Cell(4, 1e-3, 60, True, 30, 3.5),))
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"schema": 2, "belongs_to": {"task": "addition"}, "law": law.to_dict()}))
    assert read_law(path)[0] == law
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    holds(lambda: read_law(path)[0].max_lr(4, 60), SweepError)


@few
@given(st.data())
def test_what_a_run_was_started_with(tmp_path: Path, data: st.DataObject):
    path = tmp_path / "identity.json"
    path.write_bytes(data.draw(damaged(b'{"seed": 0, "task": {"name": "addition"}, "max_staleness": 4}')))
    holds(lambda: _stored(path, "max_staleness", int), RunFolderError)


@pytest.fixture(scope="module")
def whole_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    ledger = Ledger(path, group_size=2, create=True)
    for group_id in range(4):
        ledger.issue(group_id, 0)
        for member in range(2 - (group_id == 3)):
            ledger.finish(group_id, member, RESPONSE)
    for step in range(2):
        ledger.commit_step(step, step, [step], token_staleness={step: 6})
    ledger.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    return path  # not its bytes: hypothesis shows what a test is given


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage)
@example(([(0.1, 128)], 0.0, "as it is", b""))  # no UTF-8 in what SQLite says of it
def test_ledgers(tmp_path: Path, whole_ledger: Path, how: Any):
    path = tmp_path / "ledger.sqlite"
    for left in tmp_path.glob("ledger.sqlite*"):
        left.unlink()
    path.write_bytes(suffered(whole_ledger.read_bytes(), how))

    def read() -> None:
        ledger = Ledger(path, group_size=2, create=False)
        try:
            recovery = ledger.recover(-1)
            ledger.audit(max_staleness=4)
            ledger.issue(recovery.next_group_id, 0)
        finally:
            ledger.close()

    holds(read, LedgerError)


@few
@given(damage)
def test_responses_that_a_ledger_keeps(tmp_path: Path, whole_ledger: Path, how: Any):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(whole_ledger.read_bytes())
    db = sqlite3.connect(path)
    db.execute("UPDATE payloads SET response = ?", (suffered(wire.encode(RESPONSE), how),))
    db.commit()
    db.close()
    ledger = Ledger(path, group_size=2, create=False)
    holds(lambda: ledger.recover(-1), LedgerError)
    ledger.close()
