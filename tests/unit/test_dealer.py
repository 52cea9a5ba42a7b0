"""What leaves a client in one turn of its event loop arrives whole, in order, and at once."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from headway.engine.messages import Cancel, Message, Reply, Status
from headway.processes.dealer import Dealer
from headway.processes.router import Router, bound_router
from headway.wire import encode

TOKEN = "secret"


class Server:
    """A router, its socket, and what it warned of."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket, self.warnings = socket, list[str]()
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        refusal = Reply(refused="wrong token")
        self.router = Router(socket, token=TOKEN, kind=Message, refusal=refusal, warn=self.warnings.append)

    def dealer(self) -> Dealer:
        return Dealer(self.endpoint, TOKEN, receive=lambda payload: None)

    def received(self, at_least: int) -> list[object]:
        found: list[object] = []
        while len(found) < at_least:
            assert self.router.poll(5000)
            found += [message for _, message in self.router.messages()]
        return found


@pytest.fixture
def server() -> Iterator[Server]:
    with bound_router() as socket:
        yield Server(socket)


def test_what_is_sent_in_one_turn_is_one_message_and_keeps_its_order(server: Server):
    async def work() -> None:
        dealer = server.dealer()
        for id in range(3):
            dealer.send(Status(id))
        await asyncio.sleep(0)
        assert server.router.poll(5000)
        _, token, *payloads = server.socket.recv_multipart()
        assert (token, payloads) == (TOKEN.encode(), [encode(Status(id)) for id in range(3)])
        dealer.send(Status(3))
        dealer.send(Cancel(3))
        await asyncio.sleep(0)
        assert server.received(2) == [Status(3), Cancel(3)]
        dealer.close(ConnectionError("closed"))

    asyncio.run(work())


def test_a_malformed_payload_is_said_and_its_neighbors_are_served(server: Server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        socket.send_multipart([TOKEN.encode(), encode(Status(1)), b"\xc1", encode(Status(2))])
        assert server.received(2) == [Status(1), Status(2)]
    assert len(server.warnings) == 1 and "malformed" in server.warnings[0]


def test_a_client_that_hangs_up_at_once_has_said_what_it_had_to_say(server: Server):
    async def work() -> None:
        dealer = server.dealer()
        dealer.send(Cancel(7))
        dealer.close(ConnectionError("closed"))
        dealer.close(ConnectionError("closed twice"))

    asyncio.run(work())
    assert server.received(1) == [Cancel(7)]


def test_a_message_that_cannot_leave_fails_who_waits_and_all_that_follow(server: Server):
    async def work() -> None:
        dealer = server.dealer()
        id, waiting = dealer.expect()
        dealer.send(Status(id))
        assert dealer._socket is not None
        dealer._socket.close(linger=0)
        with pytest.raises(zmq.ZMQError):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(zmq.ZMQError):
            dealer.expect()

    asyncio.run(work())
