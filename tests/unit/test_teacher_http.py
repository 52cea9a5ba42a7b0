"""A teacher behind HTTP: what a server like vLLM answers, and what happens when it does not."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import torch
from teacher_servers import OWN, TOKENS, Answer, FakeServer, ask, down, scored, teacher_at

from headway.algorithms import compute_distillation_loss
from headway.protocols import RequestRefused, TeacherLost
from headway.teacher.http import BadAnswer, check_server


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(*answers: Answer) -> FakeServer:
        servers.append(FakeServer(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_it_scores_the_tokens_themselves_and_names_its_own_top(serve):
    server = serve(scored)
    scores = ask(teacher_at(server, key="secret"), num_top=3)
    assert scores.logprobs.tolist() == [[-9.0], [-9.0]]
    assert scores.top_ids is not None and scores.top_ids.tolist() == [[0, 1, 2]] * 2
    assert scores.top_logprobs is not None and scores.top_logprobs.tolist() == [[-1.0, -2.0, -3.0]] * 2
    body, authorization = server.requests[0]
    assert body["prompt"] == TOKENS.tolist() and body["model"] == "big" and body["prompt_logprobs"] == 3
    assert authorization == "Bearer secret"


def test_a_top_that_reaches_into_padding_is_refused_at_once_and_one_too_short_is_asked_for_again(serve):
    server = serve(scored)
    with pytest.raises(RequestRefused, match=r"likely ids at position 0 of the response is 2, padding.*distill.top_k"):
        ask(teacher_at(server, vocab_size=2), num_top=3)
    assert len(server.requests) == 1
    short = serve(lambda body: scored(body | {"prompt_logprobs": 1}))
    with pytest.raises(TeacherLost, match=r"2 log-probs at position 0.*3 were asked for\); let it return prompt_"):
        ask(teacher_at(short), num_top=3)
    assert len(short.requests) == 3


@pytest.mark.parametrize(("logprob", "reason"), [(-1e300, "not a finite number"), (-0.1, "add up to 1.81")])
def test_what_is_no_distribution_of_float32_is_asked_for_again(serve, logprob: float, reason: str):
    def answer(body: dict) -> tuple[int, Any]:
        code, said = scored(body)
        for position in said["choices"][0]["prompt_logprobs"][1:]:
            position |= {"0": {"logprob": logprob}, "1": {"logprob": logprob}}
        return code, said

    server = serve(answer, scored)
    retried = teacher_at(server)
    assert ask(retried, num_top=2).logprobs.tolist() == [[-9.0], [-9.0]] and retried.num_retries == 1
    with pytest.raises(TeacherLost, match=reason):
        ask(teacher_at(serve(answer)), num_top=2)


def impossible(*ids: int) -> Answer:
    """As vLLM writes −∞: −9999."""

    def answer(body: dict) -> tuple[int, Any]:
        code, said = scored(body)
        for position in said["choices"][0]["prompt_logprobs"][1:]:
            for id in ids:
                if str(id) in position:
                    position[str(id)]["logprob"] = -9999.0
        return code, said

    return answer


def test_a_token_of_probability_0_is_refused_at_once_by_name(serve):
    server = serve(impossible(7))
    with pytest.raises(RequestRefused, match="token 7 at position 1 of the response probability 0"):
        ask(teacher_at(server))
    assert len(server.requests) == 1


def test_an_id_of_probability_0_among_the_most_likely_adds_nothing_to_the_loss(serve):
    scores = ask(teacher_at(serve(impossible(1, 2))), num_top=3)
    assert scores.top_ids is not None and scores.top_ids.tolist() == [[0, 6, 1], [0, 7, 1]]
    teacher = torch.tensor(scores.top_logprobs).unsqueeze(0)
    student = torch.tensor([[[-0.5, -1.0, -2.0]] * 2], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = compute_distillation_loss(
        "forward_kl_teacher_topk", student_logprobs=student, teacher_logprobs=teacher, mask=mask
    )
    (gradient,) = torch.autograd.grad(loss, student)
    without = compute_distillation_loss(
        "forward_kl_teacher_topk", student_logprobs=student[..., :2], teacher_logprobs=teacher[..., :2], mask=mask
    )[0]
    assert loss.item() == without.item() and gradient[..., 2].eq(0).all()


def test_a_server_that_is_away_is_asked_again_and_said_once(serve):
    server, said = serve(down, down, scored), []
    teacher = teacher_at(server, said)
    assert ask(teacher).logprobs.tolist() == [[-9.0], [-9.0]]
    assert teacher.num_retries == 2 and len(server.requests) == 3
    assert len(said) == 1 and "HTTP 503" in said[0] and "loading" in said[0]


def test_a_server_that_stays_away_stops_the_run_with_its_last_words(serve):
    with pytest.raises(TeacherLost, match=r"failed 3 times in a row \(HTTP 503.*loading"):
        ask(teacher_at(serve(down)))


def test_who_always_fails_is_told_why_while_others_are_served(serve):
    """Each request has failures of its own: what another one hears meanwhile does not change its last words."""
    server = serve(lambda body: down(body) if body["prompt"][0] == 4 else scored(body))
    teacher = teacher_at(server)

    async def both() -> str:
        failing = asyncio.create_task(teacher.score(TOKENS, OWN, 0))
        while not failing.done():
            await teacher.score(TOKENS + 1, OWN + 1, 0)
        await teacher.close()
        return str(failing.exception())

    assert "failed 3 times in a row (HTTP 503" in asyncio.run(both())


def test_nobody_pauses_before_giving_up(serve):
    begun = time.monotonic()
    with pytest.raises(TeacherLost, match="start it again, then `headway resume`"):
        ask(teacher_at(serve(down), max_failures=1, first_pause_s=3.0))
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("code", [408, 429, 500, 507, 520, 599])
def test_a_server_in_trouble_is_asked_again(serve, code: int):
    server = serve(lambda body: (code, {"error": "busy"}), scored)
    assert ask(teacher_at(server)).logprobs.tolist() == [[-9.0], [-9.0]]
    assert len(server.requests) == 2


def test_after_time_outs_the_limit_is_what_to_change(serve):
    release = threading.Event()

    def slow(body: dict) -> tuple[int, Any]:
        release.wait(5)
        return scored(body)

    with pytest.raises(TeacherLost, match=r"failed 2 times.*raise distill.timeout_s from 0.1"):
        ask(teacher_at(serve(slow), timeout_s=0.1, max_failures=2))
    release.set()


def test_a_host_that_takes_no_connection_is_known_soon(serve, monkeypatch: pytest.MonkeyPatch):
    limits = []

    def nobody(address: Any, timeout: float, *_: Any) -> None:
        limits.append(timeout)
        raise TimeoutError("timed out")

    teacher = teacher_at(serve(scored), timeout_s=120.0, max_failures=1)
    monkeypatch.setattr(socket, "create_connection", nobody)
    with pytest.raises(TeacherLost, match=r"no connection within 10 s\); start it again"):
        ask(teacher)
    assert limits == [10.0]


def test_closing_hangs_up_on_a_request_under_way_and_takes_no_new_one(serve):
    release, came = threading.Event(), threading.Event()

    def slow(body: dict) -> tuple[int, Any]:
        came.set()
        release.wait(5)
        return scored(body)

    teacher = teacher_at(serve(slow))

    async def ask_and_close() -> None:
        asked = asyncio.create_task(teacher.score(TOKENS, OWN, 0))
        await asyncio.to_thread(came.wait, 5)
        asked.cancel()
        await teacher.close()

    asyncio.run(ask_and_close())
    begun = time.monotonic()
    teacher._threads.shutdown(wait=True)
    assert time.monotonic() - begun < 2.0
    with pytest.raises(ConnectionAbortedError, match="the run has ended"):
        teacher.ask([1, 2], 0)
    release.set()


def test_closing_never_hides_why_the_run_ends(serve):
    """A connection that ended by itself meanwhile cannot be shut down again."""
    teacher = teacher_at(serve(scored))
    for sock in (socket.socket(), None):
        connection = HTTPConnection("127.0.0.1")
        connection.sock = sock
        teacher._open.add(connection)
    asyncio.run(teacher.close())
    for connection in teacher._open:
        connection.close()


def test_an_answer_that_never_comes_counts_as_a_failure(serve):
    release = threading.Event()

    def slow(body: dict) -> tuple[int, Any]:
        release.wait(5)
        return scored(body)

    teacher = teacher_at(serve(slow, scored), timeout_s=0.2)
    assert ask(teacher).logprobs.tolist() == [[-9.0], [-9.0]]
    release.set()
    assert teacher.num_retries == 1


def test_a_request_it_refuses_is_not_asked_again_and_a_wrong_key_ends_the_run(serve):
    server = serve(lambda body: (400, {"error": "too long"}))
    with pytest.raises(RequestRefused, match="too long"):
        ask(teacher_at(server))
    assert len(server.requests) == 1
    with pytest.raises(TeacherLost, match=r"HTTP 401.*check its URL, key and model"):
        ask(teacher_at(serve(lambda body: (401, {"error": "who"}))))


def positive(body: dict) -> tuple[int, Any]:
    code, said = scored(body)
    said["choices"][0]["prompt_logprobs"][-1]["0"]["logprob"] = 5e-4
    return code, said


def test_a_log_prob_above_0_is_named_with_its_own_id(serve):
    with pytest.raises(TeacherLost, match=r"log-prob 0.0005 of token 0 at position 1 of the response is not"):
        ask(teacher_at(serve(positive)), num_top=2)


def test_chosen_ids_are_refused(serve):
    with pytest.raises(RequestRefused, match="tokens of the response alone"):
        ask(teacher_at(serve(scored)), query_ids=np.array([[1], [2]], np.int32))


def test_the_check_before_the_start_compares_what_ids_mean(serve):
    teacher = teacher_at(serve(scored))
    check_server(teacher, TOKENS.tolist(), 2, decode=lambda id: chr(60 + id))
    with pytest.raises(BadAnswer, match="id 5 is 'A' to the server and 'B' to the student"):
        check_server(teacher, TOKENS.tolist(), 2, decode=lambda id: chr(61 + id))
    with pytest.raises(BadAnswer, match="no prompt_logprobs as vLLM gives them"):
        check_server(teacher_at(serve(lambda body: (200, {"choices": [{"text": "x"}]}))), [1, 2], 0, decode=str)
    with pytest.raises(OSError, match="HTTP 503"):
        check_server(teacher_at(serve(down)), [1, 2], 0, decode=str)
