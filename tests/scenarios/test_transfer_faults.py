"""Scenario G4, case by case: whatever is aborted, dies or is lost, late or told twice, all KV is free within the lease.

The machines, schedulers and arenas are the shipped ones; the network is simulated, its lease 2 seconds. Thousands of
such faults at once are in `tests/unit/faults` and `tests/laws/test_faults.py`; here each has its name and its time.
"""

from __future__ import annotations

import pytest

from halocline.disagg import messages as wire
from halocline.faults.sketch import LATENCY_SECONDS, LEASE_SECONDS
from halocline.faults.world import TICK_SECONDS
from testing.calls import Call
from testing.faults import NothingEnds

WITHIN_LEASE = LEASE_SECONDS + 2 * TICK_SECONDS
"""The lease counts from the last progress, which may follow the fault by a chunk or two, and ends with a tick."""
AT_ONCE = 0.02 + 4 * LATENCY_SECONDS
"""A step that is under way, and words there and back."""
MESSAGES = (wire.Ask, wire.Offer, wire.Accept, wire.Progress, wire.Pages, wire.Taken, wire.Done, wire.Release)
LINKS = pytest.mark.parametrize(
    "is_pull", [pytest.param(False, id="push"), pytest.param(True, id="pull", marks=pytest.mark.laws)]
)


def check(call: Call, seconds: float = WITHIN_LEASE) -> None:
    """The fault came, no worker held anything for longer than that, and in the end nothing is left anywhere."""
    assert call.struck_at is not None, f"there was no such message: {call.messages}"
    assert max(call.held_seconds.values()) <= seconds, call.held_seconds
    assert call.left() == []


def test_without_a_fault_every_kind_of_message_comes_and_the_answer_is_whole() -> None:
    call = Call().run()
    assert call.is_answered
    assert call.messages.count("Pages") == 3, "30 tokens in steps of 12"
    assert {kind.__name__ for kind in MESSAGES} <= set(call.messages)


@LINKS
@pytest.mark.parametrize("becomes", ["loss", "duplicate", "late"])
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_g4_a_message_that_is_lost_late_or_doubled_costs_a_lease_at_most(
    kind: type, becomes: str, is_pull: bool
) -> None:
    call = Call(is_pull=is_pull)
    call.on(kind, call.message(becomes))
    check(call.run())
    assert call.is_answered, call.end


@LINKS
@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if kind is not wire.Progress], ids=lambda k: k.__name__)
def test_g4_an_abort_on_the_decode_side_frees_both_at_once(kind: type, is_pull: bool) -> None:
    call = Call(is_pull=is_pull)
    call.on(kind, call.abort())
    check(call.run(), AT_ONCE)
    assert call.end == "abort"


@pytest.mark.parametrize("kind", [wire.Accept, wire.Pages, wire.Taken], ids=lambda kind: kind.__name__)
def test_g4_an_abort_that_is_lost_is_told_again_when_the_other_side_speaks(kind: type) -> None:
    call = Call()
    call.on(kind, call.abort())
    call.on(wire.Abort, call.message("loss"))
    check(call.run(), AT_ONCE)
    assert call.messages.count("Abort") == 1
    assert call.end == "abort"


@pytest.mark.parametrize("kind", [wire.Pages, wire.Taken, wire.Done], ids=lambda kind: kind.__name__)
def test_g4_an_abort_behind_a_broken_network_frees_the_other_side_within_the_lease(kind: type) -> None:
    call = Call()
    call.on(kind, call.abort(parted=True))
    check(call.run())
    assert call.held_seconds["d"] <= AT_ONCE
    assert call.held_seconds["p"] > AT_ONCE, "the abort was heard after all"
    assert call.end == "abort"


def test_g4_an_abort_on_the_decode_side_while_prefill_waits_for_a_slot() -> None:
    call = Call(busy="p")
    call.at(0.3, call.abort())
    call.run()
    assert call.struck_at == 0.3
    assert call.messages.count("Pages") == 0, "prefill was meant to wait"
    assert max(call.seen_seconds.values()) <= AT_ONCE
    assert [call.world.asked[name].end for name in ("own0", "own1", "r")] == ["length", "length", "abort"]
    assert call.left() == []


@pytest.mark.parametrize("is_silent", [False, True], ids=["told", "silent"])
def test_g4_prefill_leaves_while_decode_waits_for_a_slot(is_silent: bool) -> None:
    """The reverse: the decode side holds nothing yet, says so to its client, and its own requests go on."""
    call = Call(busy="d")
    call.at(0.3, call.crash("p", is_silent=is_silent))
    call.run()
    assert call.messages.count("Pages") == 0, "decode was meant to wait"
    assert is_silent or call.messages.count("Accept") == 0
    assert [call.world.asked[name].end for name in ("own0", "own1", "r")] == ["length", "length", "lost"]
    assert call.seen_seconds["d"] <= 2 * LEASE_SECONDS, "one lease to notice, and less than another for three dials"
    assert call.left() == []


@LINKS
@pytest.mark.parametrize("is_silent", [False, True], ids=["told", "silent"])
@pytest.mark.parametrize("kind", [wire.Offer, wire.Accept, wire.Pages, wire.Taken], ids=lambda kind: kind.__name__)
def test_g4_prefill_dies_before_all_is_sent(kind: type, is_silent: bool, is_pull: bool) -> None:
    call = Call(is_pull=is_pull)
    call.on(kind, call.crash("p", is_silent=is_silent))
    check(call.run(), WITHIN_LEASE if is_silent else AT_ONCE)
    assert call.end == "lost", "its client is told that nobody computes its prompt"


@LINKS
@pytest.mark.parametrize("is_silent", [False, True], ids=["told", "silent"])
@pytest.mark.parametrize("kind", [wire.Accept, wire.Pages, wire.Taken, wire.Done], ids=lambda kind: kind.__name__)
def test_g4_decode_dies_and_prefill_keeps_nothing(kind: type, is_silent: bool, is_pull: bool) -> None:
    call = Call(is_pull=is_pull)
    call.on(kind, call.crash("d", is_silent=is_silent))
    check(call.run(), WITHIN_LEASE if is_silent else AT_ONCE)
    assert not call.knows(call.world.workers["p"])


@LINKS
@pytest.mark.parametrize("kind", [wire.Accept, wire.Pages, wire.Taken], ids=lambda kind: kind.__name__)
def test_g4_a_step_of_prefill_that_breaks_ends_the_attempt_and_not_the_request(kind: type, is_pull: bool) -> None:
    call = Call(is_pull=is_pull)
    call.on(kind, call.break_step("p"))
    check(call.run())
    assert call.is_answered
    assert call.messages.count("Fail") == 1


def test_g4_bites_a_sender_whose_leases_never_end() -> None:
    call = Call(makers=NothingEnds())
    call.on(wire.Pages, call.crash("d", is_silent=True))
    call.run()
    assert call.held_seconds["p"] > WITHIN_LEASE
    with pytest.raises(AssertionError):
        check(call)
