"""The one rounding, and reading and printing bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.units import (
    MOST_BYTES,
    MOST_SECONDS,
    ceil_div,
    ceil_to,
    floor_to,
    format_bytes,
    parse_bytes,
    parse_number,
    parse_seconds,
    parse_whole,
)

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


@pytest.mark.parametrize(
    "text",
    [
        *("", "MiB", "-1", "1.2.3", "1 XB", "1e9", "½GiB", "nan", "inf", "٣GiB", "1_000", -1),
        *("1.5", "0.5B", "0.0001k", "2000000TiB", "9" * 50, 2**60 + 1),
    ],
)
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


def test_a_fraction_without_a_unit_is_told_which_unit_may_be_meant() -> None:
    with pytest.raises(ValueError, match=r"'1.5' is a fraction of a byte; write whole bytes, or a unit: 1.5MiB"):
        parse_bytes("1.5")


def test_bytes_are_read_exactly_and_rounded_down_once() -> None:
    assert parse_bytes("0.1GiB") == 107374182
    assert parse_bytes("4.35kb") == 4350, "as a binary fraction it would be 4349.99"
    assert parse_bytes("1.0") == 1
    assert parse_bytes(MOST_BYTES) == parse_bytes(f"{MOST_BYTES}") == 2**60


ODD_NUMBERS = ["", " ", "x", "٤", "1_0", "1,5", "nan", "inf", "-inf", "0x10", "1e", ".", "+", "1 0", "½", "²"]
"""Python's own `int` or `float` take some of these."""


@pytest.mark.parametrize("text", [*ODD_NUMBERS, "1.0", "-1", "+1", " 1", "1\n", "9" * 41])
def test_a_whole_number_is_digits_alone(text: str) -> None:
    assert [parse_whole(each) for each in ("0", "016", "9" * 40)] == [0, 16, int("9" * 40)]
    with pytest.raises(ValueError, match="as a whole number; write for example 16"):
        parse_whole(text)


@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_a_number_is_written_as_anywhere(text: str) -> None:
    numbers = {"0.8": 0.8, " -3 ": -3.0, "1e-6": 1e-6, ".5": 0.5, "2.": 2.0, "+1E3": 1000.0}
    assert {each: parse_number(each) for each in numbers} == numbers
    with pytest.raises(ValueError, match=r"as a number; write for example 0\.8"):
        parse_number(text)


def test_bounds_of_bytes_and_seconds_are_told_with_the_number() -> None:
    with pytest.raises(ValueError, match="0 is 0 bytes, less than 1"):
        parse_bytes("0", least=1)
    with pytest.raises(ValueError, match="more bytes than any machine has"):
        parse_bytes("2000000TiB")
    for text in ("0", "1e3", "nan", "inf", "9" * 400, f"{MOST_SECONDS + 1}", "88000h"):
        with pytest.raises(ValueError, match="10s, 100ms or 2min"):
            parse_seconds(text, least=1e-6)
    assert parse_seconds(f"{MOST_SECONDS}") == MOST_SECONDS
