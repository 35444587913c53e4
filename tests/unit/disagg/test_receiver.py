"""The receiving machine, one message or update at a time."""

from __future__ import annotations

import numpy as np

from halocline.cache.keys import Namespace
from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, CloseLanding, Dial, Key, OpenLanding, Send, Tell
from halocline.disagg.receiver import MOST_LOSSES, Peer, Receiver
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive, Landed, LandingReady, Lost, Offered, PoolPages, RevokeWanted

LEASE = 8.0
ARRIVE = Arrive("r", (5, 6, 7, 8), SamplingParams(), 3, 1, Namespace(salt="s"), route="receive")
KEY = Key("p#1", "r", 1)
POOLS = (PoolPages(0, np.array([3, 4], np.int32)),)
ASK = wire.Ask("r", 1, (5, 6, 7, 8), SamplingParams(), 3, 1, "s")


class Room:
    """How much of a landing is missing, as the test says."""

    missing = 0


def make(room: type[Room] = Room, peer: Peer | None = None) -> Receiver:
    receiver = Receiver(LEASE, lambda key: room.missing)
    receiver.begin(ARRIVE, "tcp://p", 0.0)
    receiver.up("tcp://p", peer or Peer("p#1", 1), 0.0)
    return receiver


def landing(now: float = 0.0, peer: Peer | None = None) -> Receiver:
    receiver = make(peer=peer)
    receiver.hear("p#1", wire.Offer("r", 1), now)
    receiver.ready(LandingReady("r", 1, 3, POOLS), now)
    return receiver


def told(actions: list[Action]) -> list[object]:
    return [action.message if isinstance(action, Send) else action for action in actions]


def pages(chunk: int, attempt: int = 1) -> wire.Pages:
    return wire.Pages("r", attempt, chunk, 0, (wire.PageRun(0, 1),))


def lost_in(actions: list[Action]) -> Lost:
    (lost,) = [each.event for each in actions if isinstance(each, Tell) and isinstance(each.event, Lost)]
    return lost


def test_a_worker_is_dialed_once_for_all_requests_and_asked_when_it_answers() -> None:
    receiver = Receiver(LEASE, lambda key: 0)
    assert receiver.begin(ARRIVE, "tcp://p", 0.0) == [Dial("tcp://p")]
    second = Arrive("q", (1,), SamplingParams(), 0, route="receive")
    assert receiver.begin(second, "tcp://p", 0.0) == []
    actions = receiver.up("tcp://p", Peer("p#1", 1), 0.5)
    assert [message.request for message in told(actions)] == ["r", "q"]  # type: ignore[attr-defined]
    assert told(actions)[0] == ASK
    third = Arrive("t", (1,), SamplingParams(), 0, route="receive")
    assert [type(each) for each in told(receiver.begin(third, "tcp://p", 1.0))] == [wire.Ask]


def test_an_offer_lets_the_scheduler_reserve_and_its_landing_is_open_before_the_accept() -> None:
    receiver = make()
    assert receiver.hear("p#1", wire.Offer("r", 1), 0.0) == [Tell(Offered("r", 1))]
    assert receiver.hear("p#1", wire.Offer("r", 1), 0.0) == []
    opened, accept = receiver.ready(LandingReady("r", 1, 3, POOLS), 1.0)
    assert isinstance(opened, OpenLanding)
    assert (opened.key, opened.start_tokens, opened.fill_tokens, opened.pools) == (KEY, 3, 4, POOLS)
    assert told([accept]) == [wire.Accept("r", 1, 3)]
    assert told(receiver.hear("p#1", wire.Offer("r", 1), 1.0)) == [wire.Accept("r", 1, 3)]  # the accept was lost


def test_there_may_be_as_many_chunks_as_pages_of_all_pools() -> None:
    receiver = landing()
    for chunk in range(8):
        two_pools = wire.Pages("r", 1, chunk, 0, (wire.PageRun(0, 1), wire.PageRun(0, 0)))
        assert told(receiver.hear("p#1", two_pools, 1.0)) == [wire.Taken("r", 1, chunk)]
    beyond = wire.Pages("r", 1, 8, 0, (wire.PageRun(0, 1), wire.PageRun(0, 0)))
    assert lost_in(receiver.hear("p#1", beyond, 1.0)).message.endswith("a prompt that has 8 pages at most")


def test_the_accepted_boundary_is_a_granule_of_the_peer() -> None:
    receiver = make(peer=Peer("p#1", 4))
    receiver.hear("p#1", wire.Offer("r", 1), 0.0)
    actions = receiver.ready(LandingReady("r", 1, 6, POOLS), 0.0)
    assert told(actions)[1] == wire.Accept("r", 1, 4)
    assert isinstance(actions[0], OpenLanding)
    assert actions[0].start_tokens == 6


def test_pages_are_taken_once_and_the_landing_is_closed_before_the_request_goes_on() -> None:
    receiver = landing()
    assert told(receiver.hear("p#1", pages(1), 1.0)) == [wire.Taken("r", 1, 1)]
    assert told(receiver.hear("p#1", pages(1), 1.0)) == [wire.Taken("r", 1, 1)]
    assert receiver.hear("p#1", wire.Done("r", 1, 2, 42), 1.0) == []
    last = receiver.hear("p#1", pages(0), 1.0)
    assert told(last) == [wire.Taken("r", 1, 0), CloseLanding(KEY), Tell(Landed("r", 1, 42)), wire.Release("r", 1)]
    assert "r" not in receiver
    assert receiver.landed == 1


def test_what_is_cut_by_shorter_pages_is_told() -> None:
    receiver = landing(peer=Peer("p#1", 1, is_cut=True))
    receiver.hear("p#1", pages(0), 1.0)
    assert Tell(Landed("r", 1, 42, None, is_cut=True)) in receiver.hear("p#1", wire.Done("r", 1, 1, 42), 1.0)


def test_a_peer_that_is_done_and_sent_too_little_is_not_believed() -> None:
    receiver = landing()
    receiver._missing = lambda key: 2
    receiver.hear("p#1", pages(0), 1.0)
    actions = receiver.hear("p#1", wire.Done("r", 1, 1, 42), 1.0)
    assert actions[0] == CloseLanding(KEY)
    assert "2 pages never came" in lost_in(actions).message
    assert not lost_in(actions).is_final
    assert told(actions)[-1] == wire.Ask("r", 2, (5, 6, 7, 8), SamplingParams(), 3, 1, "s")


def test_chunks_beyond_the_last_one_do_not_count() -> None:
    receiver = landing()
    receiver.hear("p#1", pages(3), 1.0)
    assert receiver.hear("p#1", wire.Done("r", 1, 1, 42), 1.0) == []
    assert lost_in(receiver.hear("p#1", pages(4), 1.0)).message.endswith("chunk 4 of a prompt that has 4 pages at most")


def test_refused_pages_end_the_attempt_unless_the_chunk_is_there() -> None:
    receiver = landing()
    receiver.hear("p#1", pages(0), 1.0)
    assert told(receiver.hear("p#1", pages(0), 1.0, "checksum")) == [wire.Taken("r", 1, 0)]
    actions = receiver.hear("p#1", pages(1), 1.0, "checksum")
    assert actions[0] == CloseLanding(KEY)
    assert lost_in(actions).message.endswith("checksum")


def test_the_lease_is_renewed_by_falling_work_and_new_chunks_only() -> None:
    receiver = landing(now=0.0)
    receiver.hear("p#1", wire.Progress("r", 1, 9), 4.0)  # until 12
    receiver.hear("p#1", wire.Progress("r", 1, 9), 10.0)
    receiver.hear("p#1", wire.Progress("r", 1, 10), 10.5)
    receiver.hear("p#1", wire.Done("r", 1, 2, 42), 11.0)  # until 19
    receiver.hear("p#1", pages(0), 18.9)  # until 26.9
    receiver.hear("p#1", pages(0), 26.0)
    receiver.hear("p#1", wire.Offer("r", 1), 26.0)
    receiver.hear("p#1", wire.Done("r", 1, 2, 42), 26.5)
    assert not any(isinstance(action, Tell) for action in receiver.tick(26.8))
    actions = receiver.tick(26.9)
    assert actions[0] == CloseLanding(KEY)
    assert not lost_in(actions).is_final
    assert receiver.leases_lost == 1


def test_what_is_lost_is_tried_as_a_new_attempt_a_bounded_number_of_times() -> None:
    receiver, now, attempts = make(), 0.0, []
    while "r" in receiver:
        now += LEASE
        actions = receiver.tick(now)
        attempts.append((lost_in(actions).attempt, lost_in(actions).is_final))
    assert attempts == [(1, False), (2, False), (3, True)]
    assert len(attempts) == MOST_LOSSES
    assert told(actions)[-1] == wire.Abort("r", 3)


def test_messages_of_former_attempts_are_refused_and_counted() -> None:
    receiver = landing()
    receiver.hear("p#1", wire.Fail("r", 1, "broke"), 1.0)
    for message in (
        wire.Offer("r", 1),
        pages(0),
        wire.Done("r", 1, 1, 42),
        wire.Progress("r", 1, 0),
        wire.Fail("r", 1, ""),
    ):
        assert receiver.hear("p#1", message, 1.0) == []
    assert receiver.refused == 5
    assert receiver.hear("p#1", wire.Offer("r", 2), 1.0) == [Tell(Offered("r", 2))]


def test_pages_before_the_accept_are_refused() -> None:
    receiver = make()
    assert receiver.hear("p#1", pages(0), 0.0) == []
    assert receiver.refused == 1


def test_a_peer_that_holds_something_for_an_unknown_request_is_released() -> None:
    receiver = Receiver(LEASE, lambda key: 0)
    for message in (
        wire.Offer("x", 7),
        wire.Done("x", 7, 1, 1),
        wire.Progress("x", 7, 1),
        wire.Pages("x", 7, 0, 0, ()),
    ):
        assert told(receiver.hear("p#1", message, 0.0)) == [wire.Release("x", 7)]
    assert receiver.hear("p#1", wire.Fail("x", 7, "gone"), 0.0) == []
    assert receiver.hear("p#1", wire.Decline("x", 7, "no"), 0.0) == []


def test_another_connections_word_on_a_request_is_not_taken() -> None:
    receiver = landing()
    assert told(receiver.hear("p#2", wire.Done("r", 1, 0, 42), 0.0)) == [wire.Release("r", 1)]
    assert "r" in receiver


def test_a_revoked_attempt_is_closed_first_and_is_no_loss() -> None:
    receiver = landing()
    actions = receiver.revoke(RevokeWanted("r", 1), 1.0)
    assert told(actions)[:2] == [CloseLanding(KEY), wire.Revoke("r", 1)]
    assert (lost_in(actions).attempt, lost_in(actions).is_final) == (1, False)
    assert receiver.revoke(RevokeWanted("r", 1), 1.0) == []
    assert receiver.hear("p#1", wire.Offer("r", 2), 1.0) == [Tell(Offered("r", 2))]
    assert receiver._sessions["r"].losses == 0


def test_who_leaves_closes_its_landing_and_tells_the_peer() -> None:
    receiver = landing()
    assert told(receiver.end("r")) == [CloseLanding(KEY), wire.Abort("r", 1)]
    assert receiver.end("r") == []
    waiting = make()
    assert told(waiting.end("r")) == [wire.Abort("r", 1)]


def test_a_lost_connection_ends_the_attempt_at_once_and_is_dialed_again_later() -> None:
    receiver = landing()
    actions = receiver.down("tcp://p", "reset", 1.0)
    assert actions[0] == CloseLanding(KEY)
    assert not lost_in(actions).is_final
    assert len(actions) == 2
    assert receiver.tick(1.0) == []
    assert receiver.tick(2.0) == [Dial("tcp://p")]
    asked = receiver.up("tcp://p", Peer("p#2", 1), 2.5)
    assert [(each.peer, each.message.attempt) for each in asked if isinstance(each, Send)] == [("p#2", 2)]


def test_a_worker_that_cannot_be_reached_fails_the_request_after_the_last_call() -> None:
    receiver = Receiver(LEASE, lambda key: 0)
    receiver.begin(ARRIVE, "tcp://p", 0.0)
    assert receiver.down("tcp://p", "refused", 0.0) == []  # no attempt had begun
    assert receiver.tick(1.0) == [Dial("tcp://p")]
    assert receiver.down("tcp://p", "refused", 1.0) == []
    assert receiver.tick(2.0) == [Dial("tcp://p")]
    lost = lost_in(receiver.down("tcp://p", "refused", 2.0))
    assert lost.is_final
    assert "attempt 3 of 3 to have the prompt computed at tcp://p: refused" in lost.message


def test_a_declined_request_is_not_tried_again() -> None:
    receiver = make()
    assert lost_in(receiver.hear("p#1", wire.Decline("r", 1, "too long"), 0.0)).is_final
    assert "r" not in receiver


def test_what_is_not_answered_is_said_again() -> None:
    receiver = make()
    assert told(receiver.tick(1.0)) == [ASK]
    receiver.hear("p#1", wire.Offer("r", 1), 1.0)
    assert receiver.tick(100.0) == []  # it waits for room here, however long that takes
    receiver.ready(LandingReady("r", 1, 3, POOLS), 100.0)
    assert told(receiver.tick(101.0)) == [wire.Accept("r", 1, 3)]
    assert receiver.resent == 2


def test_a_landing_of_another_attempt_is_not_accepted() -> None:
    receiver = make()
    receiver.hear("p#1", wire.Offer("r", 1), 0.0)
    assert receiver.ready(LandingReady("r", 0, 3, POOLS), 0.0) == []
    assert receiver.ready(LandingReady("x", 1, 3, POOLS), 0.0) == []
    assert receiver.phases()["receive_offered"] == 1
