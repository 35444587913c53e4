"""Stop strings across any split of the text, against a search in the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.engine.stops import StopFinder

LETTERS = st.text(alphabet="ab", min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return (start, stop) of the stop that is complete first; of several complete at once the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end - len(stop), stop


def test_sequences_with_the_same_stops_share_their_tables() -> None:
    """A request has up to a thousand of them, and a table takes a millisecond of everybody's time."""
    one, other = StopFinder(("ababb", "x")), StopFinder(("x", "ababb"))
    assert one._borders[0] is other._borders[1]
    assert one._borders[0] == (0, 0, 1, 2, 0)


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(alphabet="abc", max_size=24))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@given(parts=split_texts(), stops=st.lists(LETTERS, max_size=3))
def test_the_text_ends_before_the_first_stop_however_it_is_split(parts: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = ""
    for part in parts:
        shown += finder.push(part)
        if finder.found is not None:
            break
    else:
        shown += finder.flush()
    text = "".join(parts)
    expected = first_stop(text, stops)
    assert (finder.found, shown) == ((None, text) if expected is None else (expected[1], text[: expected[0]]))


@given(parts=split_texts(), stops=st.lists(LETTERS, min_size=1, max_size=3))
def test_no_part_of_a_stop_is_ever_shown_and_no_more_is_held_than_must_be(parts: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    text = shown = ""
    for part in parts:
        text += part
        shown += finder.push(part)
        if finder.found is not None:
            break
        held = text[len(shown) :]
        longest = max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stops))
        assert len(held) == longest, f"{held!r} is held back of {text!r}"


@pytest.mark.parametrize(
    ("parts", "stop", "shown"),
    [
        (["the E", "N", "T. EN", "D now"], "END", "the ENT. "),
        (["aab", "aaab"], "aaab", "aaba"[:3]),
        (["x\n", "\nUser:"], "\n\nUser:", "x"),
        (["naïve 你", "好!"], "你好", "naïve "),
    ],
)
def test_worked_examples(parts: list[str], stop: str, shown: str) -> None:
    finder = StopFinder([stop])
    assert "".join(finder.push(part) for part in parts) == shown
    assert finder.found == stop


def test_without_stops_nothing_is_held_back() -> None:
    assert StopFinder([]).push("anything") == "anything"
