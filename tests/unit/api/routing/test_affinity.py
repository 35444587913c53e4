"""Marks of prompts: what is shared is found, what is not is not, and memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halocline.api.routing.affinity import STEP_BYTES, Seen, beginning, mark_lengths


def test_marks_are_close_where_prompts_are_short_and_within_an_eighth_where_they_are_long() -> None:
    assert list(mark_lengths(5200)) == [*range(256, 4097, 256), 4608, 5120]
    assert len(list(mark_lengths(8 << 20))) == 82


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_at_least_eight_ninths_of_what_is_shared_are_found_and_never_more_than_is(
    shared: int, first: int, second: int
) -> None:
    seen = Seen()
    seen.note(beginning(b"s" * shared + b"a" * first))
    found = seen.matched_bytes(beginning(b"s" * shared + b"b" * second))
    assert found <= shared
    if shared >= STEP_BYTES:
        assert found >= min(-(-8 * shared // 9), shared - STEP_BYTES + 1)
    elif first and second:
        assert found == 0


def test_another_salt_shares_nothing_and_salt_and_prompt_do_not_run_together() -> None:
    seen = Seen()
    seen.note(beginning(b"x" * 1000, b"salt"))
    assert seen.matched_bytes(beginning(b"x" * 1000, b"salt")) == 768
    assert seen.matched_bytes(beginning(b"x" * 1000, b"salt2")) == 0
    assert seen.matched_bytes(beginning(b"t" + b"x" * 999, b"sal")) == 0


def test_what_was_not_used_for_longest_is_forgotten_long_marks_first() -> None:
    seen = Seen(most=6)
    first, second = beginning(b"a" * 1024), beginning(b"b" * 1024)
    seen.note(first)
    seen.note(second)
    assert len(seen) == 6
    assert seen.matched_bytes(second) == 1024
    assert seen.matched_bytes(first) == 512
    seen.clear()
    assert seen.matched_bytes(second) == 0
