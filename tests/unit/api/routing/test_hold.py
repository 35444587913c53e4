"""Streams on their way through: nothing is lost, added or reordered, however they are cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.api.routing import hold as module
from halocline.api.routing.hold import ErrorEvent, Hold


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


OPENING = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
CHAT = sse({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
TEXT = sse({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
END = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
LOST = sse({"error": {"message": "gone", "type": "server_error", "param": None, "code": "prefill_lost"}})
PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


@given(
    st.lists(st.sampled_from([OPENING, CHAT, TEXT, END, PING, DONE, LOST]), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_every_stream_that_speaks_goes_through_unchanged_in_whole_events(events: list[bytes], cuts: list[int]) -> None:
    data, hold, out = b"".join(events), Hold(), b""
    head = [each for each in events if each not in (OPENING, PING)]
    for piece in pieces(data, cuts):
        ready = hold.feed(piece)
        if hold.error is not None:
            break
        out += ready
        assert out.endswith(b"\n\n") or not out
        assert bool(out) == hold.is_open
    if head and head[0] == LOST:
        assert hold.error == ErrorEvent("prefill_lost", "gone")
        assert out == b""
    else:
        assert out + hold.end() == data


@pytest.mark.parametrize("event", [CHAT, TEXT, END, DONE, b"data: nonsense\n\n"])
def test_the_first_event_that_is_no_opening_lets_the_head_go(event: bytes) -> None:
    hold = Hold()
    assert hold.feed(OPENING + PING + OPENING) == b""
    assert not hold.is_open
    assert hold.feed(event) == OPENING + PING + OPENING + event
    assert hold.is_open


def test_an_error_that_is_no_fault_is_let_go_with_what_follows() -> None:
    hold = Hold()
    assert hold.feed(OPENING + LOST + DONE[:4]) == b""
    assert hold.let_go() == OPENING + LOST
    assert hold.feed(DONE[4:]) == DONE
    assert hold.error is None


def test_half_an_event_is_never_passed_on_before_its_end() -> None:
    hold = Hold()
    assert hold.feed(CHAT + TEXT[:10]) == CHAT
    assert not hold.is_torn
    assert hold.feed(TEXT[10:]) == TEXT


def test_what_is_longer_than_may_be_held_goes_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD_BYTES", 100)
    hold, long = Hold(), b"data: " + b"x" * 95
    assert hold.feed(long) == long
    assert (hold.is_open, hold.is_torn) == (True, True)
    assert hold.feed(b"x\n\n") == b"x\n\n"
    assert not hold.is_torn
