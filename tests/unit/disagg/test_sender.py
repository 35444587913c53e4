"""The sending machine, one message or update at a time."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, Key, Recall, Send, Tell
from halocline.disagg.sender import Sender
from halocline.params import SamplingParams
from halocline.schedule.events import (
    Abort,
    Accepted,
    Arrive,
    Computed,
    Failed,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    PoolPages,
    Rejected,
)

LEASE = 8.0
ASK = wire.Ask("r", 1, (5, 6, 7), SamplingParams(), 3, -1, "salt")
ID = "@peer/r/1"


PAGE_BYTES = (10, 6)


def make(left: int = 40, most_part_bytes: int = 100) -> Sender:
    return Sender(LEASE, lambda local_id: left, PAGE_BYTES, most_part_bytes)


def offered(sender: Sender, now: float = 0.0) -> Sender:
    sender.hear("peer", ASK, now)
    sender.note(Accepted(ID, 1), now)
    return sender


def accepted(now: float = 0.0, most_part_bytes: int = 100) -> Sender:
    sender = offered(make(most_part_bytes=most_part_bytes), now)
    sender.hear("peer", wire.Accept("r", 1, 2), now)
    return sender


def also_accepted(sender: Sender, peer: str, request: str) -> Sender:
    """Bring one more request of a peer as far as `accepted` does."""
    sender.hear(peer, wire.Ask(request, 1, (5, 6, 7), SamplingParams(), 3), 0.0)
    sender.note(Accepted(f"@{peer}/{request}/1", 1), 0.0)
    sender.hear(peer, wire.Accept(request, 1, 2), 0.0)
    return sender


def is_over(actions: list[Action], local_id: str = ID) -> bool:
    return Tell(PeerReleased(local_id, 1)) in actions


def ready(chunk: int, left: int = 0) -> PagesReady:
    pools = (PoolPages(2, np.array([7, 9], np.int32)), PoolPages(0, np.array([], np.int32)))
    return PagesReady(ID, 1, chunk, 3 - left, left, pools)


def told(actions: list[Action]) -> list[object]:
    return [action.message if isinstance(action, Send) else action for action in actions]


def test_an_ask_becomes_an_arrival_and_its_acceptance_an_offer() -> None:
    sender = make()
    (tell,) = sender.hear("peer", ASK, 0.0)
    assert isinstance(tell, Tell)
    arrive = tell.event
    assert isinstance(arrive, Arrive)
    assert (arrive.request_id, arrive.prompt, arrive.seed, arrive.priority) == (ID, (5, 6, 7), 3, -1)
    assert (arrive.namespace.salt, arrive.route) == ("salt", "send")
    assert sender.hear("peer", ASK, 0.0) == []  # twice is once
    assert told(sender.note(Accepted(ID, 1), 0.0)) == [wire.Offer("r", 1)]
    assert told(sender.hear("peer", ASK, 0.0)) == [wire.Offer("r", 1)]  # the offer was lost


def test_a_request_that_can_never_run_is_declined_and_forgotten() -> None:
    sender = make()
    sender.hear("peer", ASK, 0.0)
    assert told(sender.note(Rejected(ID, "too long"), 0.0)) == [wire.Decline("r", 1, "too long")]
    assert ID not in sender
    assert not any(sender.phases().values())


def test_an_accept_admits_once_and_asks_for_progress_after_that() -> None:
    sender = offered(make(left=40))
    first = sender.hear("peer", wire.Accept("r", 1, 2), 0.0)
    assert told(first) == [Tell(PeerAccepted(ID, 1, 2)), wire.Progress("r", 1, 80)]
    assert told(sender.hear("peer", wire.Accept("r", 1, 2), 0.0)) == [wire.Progress("r", 1, 80)]


def test_pages_are_sent_with_their_runs_and_taken_once() -> None:
    sender = accepted()
    update = ready(0, left=1)
    (sent,) = sender.note(update, 1.0)
    assert isinstance(sent, Send)
    assert sent.message == wire.Pages("r", 1, 0, 1, (wire.PageRun(2, 2), wire.PageRun(0, 0)))
    assert [run.pages.tolist() for run in sent.runs] == [[7, 9], []]
    assert sender.hear("peer", wire.Taken("r", 1, 0), 1.0) == [Tell(PeerTook(ID, 1, 0))]
    assert sender.hear("peer", wire.Taken("r", 1, 0), 1.0) == []
    assert sender.hear("peer", wire.Taken("r", 1, 5), 1.0) == []


def test_done_is_said_until_it_is_released() -> None:
    sender = accepted()
    sender.note(ready(0), 1.0)
    done = wire.Done("r", 1, 1, 42, None)
    assert told(sender.note(Computed(ID, 1, 1, 42), 1.0)) == [done]
    assert told(sender.tick(1.5)) == []
    assert told(sender.tick(2.0)) == [done]
    assert sender.resent == 1
    released = sender.hear("peer", wire.Release("r", 1), 2.0)
    assert released == [Recall(Key("peer", "r", 1)), Tell(PeerReleased(ID, 1))]
    assert sender.sent == 1
    assert sender.tick(100.0) == []


def test_the_lease_runs_while_the_peer_owes_something_and_each_take_renews_it() -> None:
    sender = accepted()
    assert not any(isinstance(action, Tell) for action in sender.tick(50.0))  # computing is this side's own business
    sender.note(ready(0, left=1), 60.0)
    sender.note(ready(1), 61.0)
    sender.hear("peer", wire.Taken("r", 1, 0), 65.0)
    assert not any(isinstance(action, Tell) for action in sender.tick(72.9))
    over = sender.tick(73.0)
    assert over[:2] == [Recall(Key("peer", "r", 1)), Tell(PeerReleased(ID, 1))]
    assert isinstance(told(over)[2], wire.Fail)
    assert sender.leases_lost == 1


def test_a_lease_ends_where_nothing_is_owed_any_more() -> None:
    sender = accepted()
    sender.note(ready(0, left=1), 0.0)
    sender.hear("peer", wire.Taken("r", 1, 0), 1.0)
    assert not any(isinstance(action, Tell) for action in sender.tick(1000.0))


def test_what_says_nothing_new_does_not_renew_the_lease() -> None:
    sender = accepted()
    sender.note(ready(0, left=1), 0.0)
    sender.note(ready(1), 7.0)  # what this side computes is no progress of the peer
    sender.hear("peer", wire.Taken("r", 1, 9), 7.0)
    sender.hear("peer", wire.Accept("r", 1, 2), 7.5)
    sender.hear("peer", ASK, 7.5)
    assert Tell(PeerReleased(ID, 1)) in sender.tick(8.0)


def test_a_revoked_attempt_is_recalled_and_offered_again() -> None:
    sender = accepted()
    sender.note(ready(0, left=1), 0.0)
    again = sender.hear("peer", wire.Revoke("r", 1), 1.0)
    assert told(again) == [Recall(Key("peer", "r", 1)), Tell(PeerRevoked(ID, 1)), wire.Offer("r", 2)]
    assert sender.hear("peer", wire.Revoke("r", 1), 1.0) == []  # it came twice
    assert sender.hear("peer", wire.Taken("r", 1, 0), 1.0) == []  # of the former attempt
    assert sender.note(ready(1), 1.0) == []
    assert sender.hear("peer", wire.Accept("r", 1, 2), 1.0) == []
    assert sender.refused == 3
    assert Tell(PeerAccepted(ID, 2, 0)) in sender.hear("peer", wire.Accept("r", 2, 0), 1.0)


def test_an_ask_with_a_higher_attempt_ends_the_present_one() -> None:
    sender = accepted()
    later = wire.Ask("r", 3, (5, 6, 7), SamplingParams(), 3)
    assert told(sender.hear("peer", later, 1.0)) == [
        Recall(Key("peer", "r", 1)),
        Tell(PeerRevoked(ID, 1)),
        wire.Offer("r", 3),
    ]
    assert sender.hear("peer", ASK, 1.0) == []
    assert sender.refused == 1
    waiting = offered(make())
    assert told(waiting.hear("peer", later, 1.0)) == [wire.Offer("r", 3)]  # nothing had begun


def test_an_ask_again_before_the_scheduler_has_answered_is_offered_under_the_last_number() -> None:
    sender = make()
    sender.hear("peer", ASK, 0.0)
    assert sender.hear("peer", wire.Ask("r", 2, (5, 6, 7), SamplingParams(), 3), 0.0) == []
    assert told(sender.note(Accepted(ID, 1), 0.0)) == [wire.Offer("r", 2)]


@pytest.mark.parametrize("message", [wire.Abort("r", 1), wire.Release("r", 1)], ids=["abort", "release"])
def test_what_waits_is_aborted_and_what_runs_is_released(message: wire.ToSender) -> None:
    assert offered(make()).hear("peer", message, 0.0) == [Tell(Abort(ID))]
    assert accepted().hear("peer", message, 0.0) == [Recall(Key("peer", "r", 1)), Tell(PeerReleased(ID, 1))]


def test_an_abort_of_a_former_attempt_ends_nothing_and_one_of_a_later_does() -> None:
    sender = accepted()
    sender.hear("peer", wire.Revoke("r", 1), 0.0)
    assert sender.hear("peer", wire.Abort("r", 1), 0.0) == []
    assert sender.hear("peer", wire.Abort("r", 3), 0.0) == [Tell(Abort(ID))]


def test_who_waits_for_an_answer_to_an_unknown_request_gets_one() -> None:
    sender = make()
    for message in (wire.Accept("x", 4, 0), wire.Revoke("x", 4)):
        assert told(sender.hear("peer", message, 0.0)) == [wire.Fail("x", 4, "this worker does not know the request")]
    for silent in (wire.Taken("x", 4, 0), wire.Release("x", 4), wire.Abort("x", 4)):
        assert sender.hear("peer", silent, 0.0) == []
    assert sender.refused == 5


def test_a_request_that_fails_here_fails_there_and_its_pins_end() -> None:
    sender = accepted()
    assert told(sender.note(Failed(ID, "the step broke"), 0.0)) == [
        Recall(Key("peer", "r", 1)),
        Tell(PeerReleased(ID, 1)),
        wire.Fail("r", 1, "the step broke"),
    ]
    assert ID not in sender


def test_a_lost_connection_ends_its_own_sessions_only() -> None:
    sender = accepted()
    sender.hear("other", ASK, 0.0)
    assert sender.down("peer") == [Recall(Key("peer", "r", 1)), Tell(PeerReleased(ID, 1))]
    assert "@other/r/1" in sender
    assert sender.phases() == {"send_asked": 1, "send_offered": 0, "send_computing": 0, "send_done": 0}


def test_an_offer_is_repeated_for_ever_because_it_holds_nothing() -> None:
    sender = offered(make())
    assert [told(sender.tick(float(second))) for second in (1, 100)] == [[wire.Offer("r", 1)]] * 2


# ---- chunks that are cut


def large(chunk: int, local_id: str = ID) -> PagesReady:
    """One chunk of three pages of the first pool and three of the second: 48 bytes."""
    pools = (PoolPages(2, np.array([7, 9, 1], np.int32)), PoolPages(0, np.array([4, 5, 6], np.int32)))
    return PagesReady(local_id, 1, chunk, 3, 0, pools)


def test_a_large_chunk_travels_in_parts_each_with_a_number_and_done_counts_them() -> None:
    sender = accepted(most_part_bytes=20)
    sent = told(sender.note(large(0), 0.0))
    runs = [[(run.first_page, run.pages) for run in each.runs] for each in sent]  # type: ignore[attr-defined]
    assert runs == [[(2, 2), (0, 0)], [(4, 1), (0, 1)], [(5, 0), (1, 2)]]
    assert [each.chunk for each in sent] == [0, 1, 2]  # type: ignore[attr-defined]
    assert [each.chunk for each in told(sender.note(large(1), 0.0))] == [3, 4, 5]  # type: ignore[attr-defined]
    assert told(sender.note(Computed(ID, 1, 2, 42), 0.0)) == [wire.Done("r", 1, 6, 42, None)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 2, 1, 1, 0)], ids=["in turn", "reordered", "doubled"])
def test_a_chunk_stays_pinned_until_all_its_parts_are_taken(order: tuple[int, ...]) -> None:
    sender = accepted(most_part_bytes=20)
    sender.note(large(0), 0.0)
    sender.note(large(1), 0.0)
    heard = [sender.hear("peer", wire.Taken("r", 1, chunk), 0.0) for chunk in order]
    assert heard == [[]] * (len(order) - 1) + [[Tell(PeerTook(ID, 1, 0))]]
    assert sender.hear("peer", wire.Taken("r", 1, 1), 0.0) == []


def test_a_chunk_that_takes_longer_than_the_lease_is_kept_while_its_parts_are_taken() -> None:
    sender = accepted(most_part_bytes=20)
    sender.note(large(0), 0.0)
    for chunk in range(3):
        assert not is_over(sender.tick(7.0 * chunk + 7.9))
        sender.hear("peer", wire.Taken("r", 1, chunk), 7.0 * (chunk + 1))
    assert not is_over(sender.tick(1000.0))
    whole = accepted()
    whole.note(large(0), 0.0)
    assert is_over(whole.tick(8.0))


def test_a_chunk_without_pages_is_not_sent_and_its_pin_ends() -> None:
    sender = accepted()
    empty = (PoolPages(2, np.array([], np.int32)), PoolPages(0, np.array([], np.int32)))
    assert sender.note(PagesReady(ID, 1, 0, 2, 1, empty), 0.0) == [Tell(PeerTook(ID, 1, 0))]
    assert not is_over(sender.tick(1000.0))
    (sent,) = told(sender.note(ready(1), 0.0))
    assert sent == wire.Pages("r", 1, 0, 0, (wire.PageRun(2, 2), wire.PageRun(0, 0)))


def test_a_new_attempt_numbers_its_chunks_from_nought() -> None:
    sender = accepted(most_part_bytes=20)
    sender.note(large(0), 0.0)
    sender.hear("peer", wire.Revoke("r", 1), 0.0)
    sender.hear("peer", wire.Accept("r", 2, 2), 0.0)
    update = PagesReady(ID, 2, 0, 3, 0, large(0).pools)
    assert [each.chunk for each in told(sender.note(update, 0.0))] == [0, 1, 2]  # type: ignore[attr-defined]


def test_what_was_sent_before_renews_who_waits_behind_it_and_what_came_later_does_not() -> None:
    sender = also_accepted(accepted(), "peer", "q")
    sender.note(ready(0, left=2), 0.0)
    sender.note(ready(1, left=1), 0.0)
    sender.note(large(0, "@peer/q/1"), 0.0)
    sender.note(ready(2), 0.0)
    sender.hear("peer", wire.Taken("r", 1, 0), 7.0)  # both until 15
    sender.hear("peer", wire.Taken("r", 1, 1), 14.0)  # both until 22
    sender.hear("peer", wire.Taken("r", 1, 2), 21.0)  # came after q's: r until it is done, q still until 22
    assert not is_over(sender.tick(21.9), "@peer/q/1")
    assert is_over(sender.tick(22.0), "@peer/q/1")


def test_what_other_peers_take_renews_nobody() -> None:
    sender = also_accepted(accepted(), "other", "q")
    sender.note(ready(0), 0.0)
    sender.note(large(0, "@other/q/1"), 0.0)
    sender.hear("peer", wire.Taken("r", 1, 0), 7.0)
    assert is_over(sender.tick(8.0), "@other/q/1")


def test_progress_counts_the_chunks_of_others_that_go_before() -> None:
    sender = also_accepted(accepted(most_part_bytes=20), "peer", "q")
    sender.note(large(0), 0.0)
    assert wire.Progress("q", 1, 80 + 3) in told(sender.tick(1.0))
    sender.note(large(0, "@peer/q/1"), 1.0)
    sender.note(large(1), 1.0)
    sender.note(Computed("@peer/q/1", 1, 1, 42), 1.0)
    sender.hear("peer", wire.Taken("r", 1, 0), 1.5)
    said = told(sender.tick(2.0))
    assert said[-2:] == [wire.Progress("q", 1, 2), wire.Done("q", 1, 3, 42, None)]
    assert wire.Progress("r", 1, 80) in said


def test_who_has_nothing_on_the_line_waits_for_what_any_peer_has_yet_to_take() -> None:
    sender = also_accepted(accepted(most_part_bytes=20), "other", "q")
    sender.note(large(0), 0.0)
    assert wire.Progress("q", 1, 80 + 3) in told(sender.tick(1.0))  # their pages hold the memory that it needs
    sender.note(large(0, "@other/q/1"), 1.0)
    assert wire.Progress("q", 1, 80) in told(sender.tick(2.0))  # on its own line nothing is before it
