"""A teacher behind HTTP: what a server like vLLM answers, and what happens when it does not."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from headway.algorithms import compute_distillation_loss
from headway.protocols import RequestRefused, TeacherLost
from headway.teacher.http import BadAnswer, HttpTeacher, check_server
from headway.types import TeacherScores

TOKENS = np.array([4, 5, 6, 7], np.int32)
OWN = TOKENS[-2:, None]
Answer = Callable[[dict], tuple[int, Any]]


class FakeServer:
    """Answers `/v1/completions` with what the test wrote down, one function a request; the last one stays."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[tuple[dict, str | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((body, self.headers.get("Authorization")))
                code, answer = answers[min(len(fake.requests), len(answers)) - 1](body)
                data = json.dumps(answer).encode()
                self.send_response(code if self.path == "/v1/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(BrokenPipeError):  # a client that timed out has hung up
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(*answers: Answer) -> FakeServer:
        servers.append(FakeServer(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scored(body: dict) -> tuple[int, Any]:
    """As vLLM: nothing for the first token, then the token's own entry beside the most likely ids."""
    entries: list[Any] = [None]
    for token in body["prompt"][1:]:
        likely = {str(id): {"logprob": -1.0 - id, "rank": id + 1} for id in range(body["prompt_logprobs"])}
        own = {"logprob": -9.0, "rank": 9, "decoded_token": chr(60 + token)}
        entries.append(likely | {str(token): own})
    return 200, {"choices": [{"text": "x", "prompt_logprobs": entries}]}


def down(body: dict) -> tuple[int, Any]:
    return 503, {"error": "loading"}


def teacher_at(server: FakeServer, said: list[str] | None = None, **options: Any) -> HttpTeacher:
    options = {"vocab_size": 50, "timeout_s": 5.0, "max_failures": 3, "key": ""} | options
    say = (said if said is not None else []).append
    return HttpTeacher(server.url, model="big", say=say, first_pause_s=0.01, **options)


def ask(teacher: HttpTeacher, query_ids: np.ndarray = OWN, num_top: int = 0) -> TeacherScores:
    async def once() -> TeacherScores:
        try:
            return await teacher.score(TOKENS, query_ids, num_top)
        finally:
            await teacher.close()

    return asyncio.run(once())


def test_it_scores_the_tokens_themselves_and_names_its_own_top(serve):
    server = serve(scored)
    scores = ask(teacher_at(server, key="secret"), num_top=3)
    assert scores.logprobs.tolist() == [[-9.0], [-9.0]]
    assert scores.top_ids is not None and scores.top_ids.tolist() == [[0, 1, 2]] * 2
    assert scores.top_logprobs is not None and scores.top_logprobs.tolist() == [[-1.0, -2.0, -3.0]] * 2
    body, authorization = server.requests[0]
    assert body["prompt"] == TOKENS.tolist() and body["model"] == "big" and body["prompt_logprobs"] == 3
    assert authorization == "Bearer secret"


def test_ids_beyond_the_students_vocabulary_are_never_its_top(serve):
    with pytest.raises(TeacherLost, match="2 log-probs at a position, 3 were asked for"):
        ask(teacher_at(serve(scored), vocab_size=2), num_top=3)


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
