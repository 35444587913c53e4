"""The one rounding, and reading and printing bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.units import ceil_div, ceil_to, floor_to, format_bytes, parse_bytes

COUNTS = st.integers(0, 2**70)
UNITS = st.integers(1, 2**40)


@given(COUNTS, UNITS)
def test_ceil_div_is_the_least_number_of_units_that_hold_the_count(count: int, unit: int) -> None:
    units = ceil_div(count, unit)
    assert (units - 1) * unit < count <= units * unit or count == units == 0


@given(COUNTS, UNITS)
def test_rounding_down_and_up_enclose_the_count(count: int, unit: int) -> None:
    low, high = floor_to(count, unit), ceil_to(count, unit)
    assert low <= count <= high
    assert low % unit == high % unit == 0
    assert high - low in (0, unit)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1k", 1000),
        ("1KiB", 1024),
        ("256MiB", 268435456),
        (" 2 gib ", 2**31),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        (4096, 4096),
    ],
)
def test_byte_counts_are_read_as_people_write_them(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.2.3", "1 XB", "1e9", "½GiB", "nan", -1])
def test_what_is_no_byte_count_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="byte"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (268435456, "256 MiB"),
        (2**31 + 2**20, "2 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_byte_counts_are_printed_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**50))
def test_a_printed_count_is_read_back_within_its_three_digits(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(1, count * 0.006)
