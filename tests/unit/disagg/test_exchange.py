"""The exchange: what is told to whom, and in which order."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.exchange import Exchange
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.params import SamplingParams
from halocline.schedule.events import (
    Abort,
    Accepted,
    Admitted,
    Arrive,
    Computed,
    Failed,
    Landed,
    LandingReady,
    Lost,
    NewToken,
    Offered,
    PagesReady,
    PeerReleased,
    PoolPages,
    Rejected,
    RevokeWanted,
)
from halocline.step import TokenLogprobs

LEASE = 8.0
FACTS = wire.PeerFacts(
    model="m", dtype="d", vocab_size=9, granule_tokens=4, pools=(wire.PoolFacts("full", 4, 60, 64, ()),)
)
OWN = wire.Hello(role="both", epoch="own", facts=FACTS)
PEER = wire.Hello(role="prefill", epoch="peer", facts=FACTS)
POOLS = (PoolPages(0, np.array([3, 4], np.int32)),)
ARRIVE = Arrive("r", (1, 2, 3, 4, 5), SamplingParams(), 0, route="receive")


class Desk:
    """Post and landings in one: notes what is done with them, in order."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.done: list[object] = []
        self.dials = 0

    def poll(self) -> list[News]:
        news, self.news = self.news, []
        return news

    def fileno(self) -> int:
        return 77

    def dial(self, address: str) -> str:
        self.dials += 1
        self.done.append(("dial", address))
        return f"{address}#{self.dials}"

    def send(self, peer: str, message: wire.Message, runs: object = ()) -> None:
        del runs
        self.done.append((peer, message))

    def recall(self, peer: str, request: str, attempt: int) -> None:
        self.done.append(("recall", peer, request, attempt))

    def hang_up(self, peer: str, why: str) -> None:
        self.done.append(("hang up", peer, why))

    def figures(self) -> dict[str, int]:
        return {"sent_bytes": 5}

    def open(self, key: Key, start_tokens: int, fill_tokens: int, pools: object) -> None:
        del pools
        self.done.append(("open", key, start_tokens, fill_tokens))

    def close(self, key: Key | None = None) -> None:
        self.done.append(("close", key))

    def missing(self, key: Key) -> int:
        del key
        return 0

    def take(self) -> list[object]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def exchange(desk: Desk) -> Exchange:
    return Exchange(desk, desk, OWN, lease_seconds=LEASE, work_before=lambda request_id: 7)


def landing(exchange: Exchange, desk: Desk) -> Key:
    """Bring a request so far that its landing is open."""
    exchange.assign("r", "tcp://p")
    assert exchange.before([ARRIVE], 0.0) == [ARRIVE]
    assert exchange.after([Accepted("r", 3)], 0.0) == [Accepted("r", 3)]
    desk.news.append(Up("tcp://p#1", PEER))
    desk.news.append(Delivered("tcp://p#1", wire.Offer("r", 1)))
    assert exchange.before([], 0.0) == [Offered("r", 1, gives_way=True)]
    assert exchange.after([Admitted("r", 0), LandingReady("r", 1, 4, POOLS)], 0.0) == [Admitted("r", 0)]
    return Key("tcp://p#1", "r", 1)


def test_a_prompt_is_asked_for_where_it_was_assigned_and_lands(exchange: Exchange, desk: Desk) -> None:
    key = landing(exchange, desk)
    ask = wire.Ask("r", 1, (1, 2, 3, 4, 5), SamplingParams(), 0)
    assert desk.take() == [
        ("dial", "tcp://p"),
        (key.peer, ask),
        ("open", key, 4, 5),
        (key.peer, wire.Accept("r", 1, 4)),
    ]
    assert exchange.figures().landing_bytes == 2 * 64
    desk.news.append(Delivered(key.peer, wire.Pages("r", 1, 0, 0, (wire.PageRun(0, 2),))))
    desk.news.append(Delivered(key.peer, wire.Done("r", 1, 1, 6)))
    assert exchange.before([], 0.5) == [Landed("r", 1, 6)]
    assert desk.take() == [(key.peer, wire.Taken("r", 1, 0)), ("close", key), (key.peer, wire.Release("r", 1))]
    figures = exchange.figures()
    assert (figures.landing_bytes, figures.peers, figures.totals["received"]) == (0, 1, 1)
    assert figures.totals["sent_bytes"] == 5
    assert not any(figures.sessions.values())


@pytest.mark.parametrize(
    "done",
    [
        wire.Done("r", 1, 1, 9),
        wire.Done("r", 1, 1, 8, TokenLogprobs(-0.5, 1, ((8, -0.5), (9, -1.5)))),
        wire.Done("r", 1, 1, 8, TokenLogprobs(-0.5, 1, ((-1, -0.5),))),
    ],
    ids=["token", "beside it", "negative"],
)
def test_a_first_token_that_the_model_does_not_have_costs_the_attempt(
    exchange: Exchange, desk: Desk, done: wire.Done
) -> None:
    """To compute on from it would break a step, and with it everybody who is in that step."""
    key = landing(exchange, desk)
    desk.take()
    desk.news.append(Delivered(key.peer, wire.Pages("r", 1, 0, 0, (wire.PageRun(0, 2),))))
    desk.news.append(Delivered(key.peer, done))
    (lost,) = exchange.before([], 0.5)
    assert isinstance(lost, Lost)
    assert "; the model's are 0 to 8" in lost.message
    assert not lost.is_final
    assert ("close", key) in desk.take()


def test_of_two_workers_landings_of_the_one_before_the_other_give_way(desk: Desk) -> None:
    for own, peer, gives_way in (("a", "b", True), ("b", "a", False)):
        hello = wire.Hello(role="both", epoch=own, facts=FACTS)
        exchange = Exchange(desk, desk, hello, lease_seconds=LEASE, work_before=lambda request_id: 7)
        exchange.assign("r", "tcp://p")
        exchange.before([ARRIVE], 0.0)
        exchange.after([Accepted("r", 3)], 0.0)
        name = f"tcp://p#{desk.dials}"
        desk.news = [
            Up(name, wire.Hello(role="both", epoch=peer, facts=FACTS)),
            Delivered(name, wire.Offer("r", 1)),
        ]
        assert exchange.before([], 0.0) == [Offered("r", 1, gives_way)]


def test_a_request_that_the_own_scheduler_rejects_is_asked_of_nobody(exchange: Exchange, desk: Desk) -> None:
    exchange.assign("r", "tcp://p")
    exchange.before([ARRIVE], 0.0)
    rejected = Rejected("r", "too long")
    assert exchange.after([rejected], 0.0) == [rejected]
    assert exchange.after([Accepted("r", 3)], 0.0) == [Accepted("r", 3)]
    assert desk.take() == []


def test_a_landing_is_closed_before_the_scheduler_hears_of_the_abort(exchange: Exchange, desk: Desk) -> None:
    key = landing(exchange, desk)
    desk.take()
    assert exchange.before([Abort("r")], 0.5) == [Abort("r")]
    assert desk.take() == [("close", key), (key.peer, wire.Abort("r", 1))]


@pytest.mark.parametrize("end", [Failed("r", "broke"), NewToken("r", None, None, "abort")], ids=["failed", "ended"])
def test_what_ends_here_ends_there(exchange: Exchange, desk: Desk, end: Failed | NewToken) -> None:
    key = landing(exchange, desk)
    desk.take()
    assert exchange.after([end], 0.5) == [end]
    assert desk.take() == [("close", key), (key.peer, wire.Abort("r", 1))]


def test_a_revoked_landing_is_closed_now_and_told_in_the_next_turn(exchange: Exchange, desk: Desk) -> None:
    key = landing(exchange, desk)
    desk.take()
    assert exchange.after([RevokeWanted("r", 1)], 0.5) == []
    assert desk.take() == [("close", key), (key.peer, wire.Revoke("r", 1))]
    (lost,) = exchange.before([], 0.5)
    assert isinstance(lost, Lost)
    assert not lost.is_final


def test_peers_requests_are_never_told_to_the_front_end(exchange: Exchange, desk: Desk) -> None:
    desk.news.append(Up("in#1", PEER))
    desk.news.append(Delivered("in#1", wire.Ask("x", 1, (1, 2), SamplingParams(), 0)))
    (arrive,) = exchange.before([], 0.0)
    assert isinstance(arrive, Arrive)
    name = arrive.request_id
    assert exchange.after([Accepted(name, 1)], 0.0) == []
    desk.news.append(Delivered("in#1", wire.Accept("x", 1, 0)))
    exchange.before([], 0.0)
    desk.take()
    assert exchange.after([Admitted(name, 0), PagesReady(name, 1, 0, 2, 0, POOLS), Computed(name, 1, 1, 8)], 0.0) == []
    assert desk.take() == [
        ("in#1", wire.Pages("x", 1, 0, 0, (wire.PageRun(0, 2),))),
        ("in#1", wire.Done("x", 1, 1, 8)),
    ]
    desk.news.append(Down("in#1", "reset"))
    assert exchange.before([], 0.1) == [PeerReleased(name, 1)]
    assert desk.take() == [("recall", "in#1", "x", 1)]
    assert exchange.after([NewToken(name, None, None, "abort")], 0.1) == []


def test_a_worker_that_does_not_fit_is_left_with_every_reason(exchange: Exchange, desk: Desk) -> None:
    exchange.assign("r", "tcp://p")
    exchange.before([ARRIVE], 0.0)
    exchange.after([Accepted("r", 3)], 0.0)
    facts = wire.PeerFacts(model="n", dtype="d", vocab_size=9, granule_tokens=4, pools=FACTS.pools)
    desk.news.append(Up("tcp://p#1", wire.Hello(role="decode", epoch="peer", facts=facts)))
    exchange.before([], 0.0)
    ((_, _, why),) = [each for each in desk.take() if each[0] == "hang up"]  # type: ignore[index]
    assert "the worker at tcp://p cannot work with this one: its model is n, here it is m" in why
    assert "its role is decode" in why
    assert exchange.figures().peers == 0


def test_heartbeats_go_out_and_a_silent_peer_is_left(exchange: Exchange, desk: Desk) -> None:
    key = landing(exchange, desk)
    now = 0.0
    for _ in range(15):  # D's landing waits; P says nothing any more
        now += 0.5
        exchange.before([], now)
    beats = [each for each in desk.take() if isinstance(each[1], wire.Heartbeat)]  # type: ignore[index]
    assert len(beats) == 3
    told = [event for step in range(1, 4) for event in exchange.before([], now + step * 0.5)]
    assert any(isinstance(event, Lost) for event in told)
    assert ("hang up", key.peer, "nothing was heard of it for 8 s") in desk.take()


def test_after_a_gap_silence_proves_nothing(exchange: Exchange, desk: Desk) -> None:
    landing(exchange, desk)
    desk.take()
    exchange.before([], 100.0)  # this process was stopped
    assert not any(each[0] == "hang up" for each in desk.take())  # type: ignore[index]
    for step in range(1, 16):
        desk.news.append(Delivered("tcp://p#1", wire.Heartbeat()))
        exchange.before([], 100.0 + step)
    assert exchange.figures().peers == 1


def test_closing_closes_every_landing_and_the_post(exchange: Exchange, desk: Desk) -> None:
    key = landing(exchange, desk)
    desk.take()
    exchange.close()
    assert desk.take() == [("close", key), ("close", None)]
    assert exchange.fileno() == 77
