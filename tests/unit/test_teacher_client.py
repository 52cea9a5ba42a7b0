"""The asyncio side of a teacher's process, on a socket that answers what a test wrote down."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from headway.processes.router import bound_router
from headway.protocols import RequestRefused
from headway.teacher.client import TeacherClient, TeacherDied
from headway.teacher.messages import Score, Scored
from headway.types import TeacherScores
from headway.wire import decode, encode

TOKENS, QUERY = np.array([4, 5], np.int32), np.array([[5]], np.int32)
SCORES = TeacherScores(np.array([[-0.5]], np.float32))

Answer = Callable[[int], list[bytes]]
"""From a request's number to the messages that come back."""


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Iterator["zmq.Socket[bytes]"]:
    monkeypatch.delenv("HEADWAY_HOST", raising=False)
    with bound_router() as bound:
        yield bound


def outcomes(
    socket: "zmq.Socket[bytes]", *answers: Answer
) -> tuple[list[TeacherScores | BaseException], TeacherClient]:
    """What one request after another comes to."""

    async def one_by_one() -> tuple[list[TeacherScores | BaseException], TeacherClient]:
        client = TeacherClient(socket.getsockopt_string(zmq.LAST_ENDPOINT), "token")
        found: list[TeacherScores | BaseException] = []
        try:
            for answer in answers:
                asked = asyncio.create_task(client.score(TOKENS, QUERY, 0))
                await serve_one(asked, answer)
                found.append(asked.exception() or asked.result())
            assert client.num_pending == 0
        finally:
            client.close()
        return found, client

    async def serve_one(asked: "asyncio.Task[TeacherScores]", answer: Answer) -> None:
        while not asked.done():
            if socket.poll(0):
                sender, token, payload = socket.recv_multipart()
                assert token == b"token"
                for message in answer(decode(payload, Score).id):
                    socket.send_multipart([sender, message])
            await asyncio.sleep(0.005)

    return asyncio.run(asyncio.wait_for(one_by_one(), 20))


def good(id: int, busy_s: float = 2.0) -> list[bytes]:
    return [encode(Scored(id, SCORES, busy_s=busy_s))]


def test_scores_come_back_and_the_busy_time_never_falls(socket: "zmq.Socket[bytes]"):
    found, client = outcomes(socket, good, lambda id: good(id, busy_s=1.0))
    assert [isinstance(scores, TeacherScores) and scores.logprobs.tolist() for scores in found] == [[[-0.5]]] * 2
    assert client.busy_s == 2.0


def test_one_refused_request_leaves_the_next_alone(socket: "zmq.Socket[bytes]"):
    found, _ = outcomes(socket, lambda id: [encode(Scored(id, refused="too long"))], good)
    assert isinstance(found[0], RequestRefused) and "the teacher refused: too long" in str(found[0])
    assert isinstance(found[1], TeacherScores) and not isinstance(found[0], TeacherDied)


def test_an_answer_that_nobody_waits_for_is_passed_over(socket: "zmq.Socket[bytes]"):
    found, _ = outcomes(socket, lambda id: good(id + 7) + good(id))
    assert isinstance(found[0], TeacherScores)


def test_an_undecodable_answer_is_the_death_of_the_teacher(socket: "zmq.Socket[bytes]"):
    found, client = outcomes(socket, lambda id: [b"\xc1"], good)
    assert client.is_lost
    for error in found:  # the second is not even sent: whoever watches replaces the process
        assert isinstance(error, TeacherDied) and "malformed answer" in str(error)


def test_a_wrong_token_ends_everything_this_client_asks(socket: "zmq.Socket[bytes]"):
    found, _ = outcomes(socket, lambda id: [encode(Scored(refused="wrong token"))], good)
    assert all(isinstance(error, PermissionError) and "wrong token" in str(error) for error in found)
