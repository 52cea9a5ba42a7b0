"""What rank 0 says of another rank that ended: its own words where it refused, its death where it died."""

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.config import parse_config
from headway.runtime.group import (
    LOST_A_PEER,
    REFUSED,
    FollowerSettings,
    find_meeting,
    have_arrived,
    open_meeting,
)
from headway.runtime.ranks import Followers, RankLost, RankRefused
from headway.runtime.site import Site
from headway.weights.group import call


class Ended:
    log_path = "logs/learner-rank-1.log"

    def __init__(self, code: int | None) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code

    def log_tail(self, num_lines: int = 20) -> str:
        return "\n".join(
            ["headway learner rank 1: ready", "headway learner rank 1: step 3: a token is nan"][-num_lines:]
        )


def followers(*codes: int | None) -> Followers:
    found: Any = Followers.__new__(Followers)
    found._children = {rank: Ended(code) for rank, code in enumerate(codes, start=1)}
    return found


def test_a_rank_that_refused_speaks_for_itself():
    with pytest.raises(RankRefused, match=r"^learner rank 1: step 3: a token is nan$"):
        followers(REFUSED, LOST_A_PEER)._require_alive()


def test_a_rank_that_died_is_named_with_its_exit_code_and_log():
    with pytest.raises(RankLost, match=r"learner rank 2 died \(exit -9\)(.|\n)*step 3"):
        followers(LOST_A_PEER, -9)._require_alive()


def test_ranks_that_run_or_lost_a_peer_are_not_at_fault():
    followers(None, LOST_A_PEER)._require_alive()


class Store:
    def __init__(self, *arrived: int) -> None:
        self._keys = {f"arrived/{rank}" for rank in arrived}

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self._keys


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (-9, RankLost, r"learner rank 2 died \(exit -9\)"),
        (REFUSED, RankRefused, "a token is nan"),
        (LOST_A_PEER, RankLost, "learner rank 2 did not reach the meeting"),
    ],
)
def test_a_rank_that_ends_before_it_joins_is_named_at_once(code: int, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        followers(None, code)._await_arrival(Store(1))


def test_ranks_that_have_arrived_are_not_waited_for():
    followers(None, None)._await_arrival(Store(1, 2))


def test_a_rank_that_cannot_start_is_a_lost_rank_and_no_traceback(tmp_path: Path):
    def spawn(*_: Any, what: str, **options: Any) -> Any:
        raise RuntimeError(f"{what} exited with code 1; the end of its log")

    config = parse_config({"learner": {"num_ranks": 3}})
    folder: Any = SimpleNamespace(logs=tmp_path)
    with ExitStack() as stack, pytest.raises(RankLost, match=r"^learner rank \d exited with code 1"):
        Followers(config, "model", folder, stack, Site(spawn))


def test_the_store_that_ranks_meet_in_does_not_give_the_token_away(tmp_path: Path):
    seen: dict[str, str] = {}

    def spawn(module: str, variables: Mapping[str, str], **options: Any) -> Any:
        meeting = msgspec.json.decode(variables["HEADWAY_RANK"], type=FollowerSettings).meeting
        find_meeting(meeting)[0].set("arrived/1", "")
        host, _, port = meeting.partition("/")[0].rpartition(":")
        stranger = call(host, int(port), 5.0)
        seen.update(token=variables["HEADWAY_TOKEN"], listed=" ".join(stranger.list_keys()))
        raise RuntimeError("seen enough")

    config = parse_config({"learner": {"num_ranks": 2}})
    folder: Any = SimpleNamespace(logs=tmp_path)
    with ExitStack() as stack, pytest.raises(RankLost):
        Followers(config, "model", folder, stack, Site(spawn))
    assert "arrived/1" in seen["listed"] and seen["token"] not in seen["listed"]


def test_ranks_meet_only_where_the_key_is_the_same():
    store, meeting = open_meeting("127.0.0.1")
    friend, _ = find_meeting(meeting)
    stranger, _ = find_meeting(f"{meeting.partition('/')[0]}/guess")
    stranger.set("arrived/1", "")
    assert not have_arrived(store, [1])
    friend.set("arrived/1", "")
    store.set_timeout(timedelta(seconds=5))
    store.wait(["arrived/1"])
    assert have_arrived(store, [1])
