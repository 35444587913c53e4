"""The only rounding in the program, and the only reading and printing of byte counts.

Everything that turns tokens into pages, pages into slabs or bytes into text goes through here, so that no two
places can round the same number differently. What users write of numbers, bytes and seconds is read here, once per unit
and within bounds, so that no option takes what another one refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from urllib.parse import SplitResult, urlsplit

MOST_BYTES = 2**60
"""No option takes more: a byte count that no machine has is a mistake, and page numbers would outgrow their type."""
MOST_SECONDS = 10 * 366 * 86400
"""No option takes more: ten years."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}

_TIME_UNITS = {
    "": Fraction(1),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
    "us": Fraction(1, 1_000_000),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_MOST_DIGITS = 40
"""Of a number that is read at all."""


def ceil_div(count: int, unit: int) -> int:
    """Return how many whole `unit`s hold `count`; both counts in the same unit, `unit` > 0."""
    return -(-count // unit)


def floor_to(count: int, unit: int) -> int:
    """Return the largest multiple of `unit` that is at most `count`."""
    return count // unit * unit


def ceil_to(count: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `count`."""
    return ceil_div(count, unit) * unit


def parse_whole(text: str) -> int:
    """Read a whole number that is written in digits from 0 to 9 and nothing else; raises ValueError.

    `int` also takes the digits of other scripts, signs, spaces and underscores.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ValueError(f"cannot read {text!r} as a whole number; write for example 16")
    return int(text)


def parse_number(text: str) -> float:
    """Read a number such as `"0.8"`, `"-3"` or `"1e-6"`, with spaces around it; raises ValueError.

    `float` also takes the digits of other scripts, underscores, `inf` and `nan`.
    """
    if re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.ASCII | re.IGNORECASE) is None:
        raise ValueError(f"cannot read {text!r} as a number; write for example 0.8")
    return float(text)


def parse_server(url: str) -> SplitResult:
    """Take the address of an HTTP server apart; raises ValueError where it says of none how to reach it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # `port` raises, too
        raise ValueError(f"{url!r} is no server's address")
    return parts


def parse_bytes(text: str | int, least: int = 0) -> int:
    """Read a byte count such as `"256MiB"`, `"2GiB"`, `"1.5 gb"` or a plain number of bytes, and round it down.

    Raises ValueError with the accepted forms when `text` is none of them, is a fraction without a unit (`"1.5"` was
    meant to have one), or is not from `least` to MOST_BYTES.
    """
    if isinstance(text, int):
        count = text
    else:
        number, unit = _quantity(text, _BYTE_UNITS)
        if number is None or unit is None:
            raise ValueError(f"cannot read {text!r} as bytes; write for example 268435456, 256MiB or 2GiB")
        if unit == 1 and number.denominator > 1:
            raise ValueError(f"{text!r} is a fraction of a byte; write whole bytes, or a unit: {text.strip()}MiB")
        count = int(number * unit)
        if count == 0 and number:
            raise ValueError(f"{text!r} is less than one byte; write for example 268435456, 256MiB or 2GiB")
    if count < 0:
        raise ValueError(f"a byte count cannot be negative: {text}")
    if count < least:
        raise ValueError(f"{text} is {count} bytes, less than {least}; write for example 256MiB or 2GiB")
    if count > MOST_BYTES:
        raise ValueError(f"{text} is more bytes than any machine has (at most {MOST_BYTES}); write for example 2GiB")
    return count


def parse_seconds(text: str | float, least: float = 0.0) -> float:
    """Read a duration such as `"10s"`, `"100ms"`, `"2min"` or a plain number of seconds, and return seconds.

    Raises ValueError with the accepted forms when `text` is none of them, or is not from `least` to MOST_SECONDS.
    """
    number, unit = _quantity(str(text), _TIME_UNITS)
    if number is None or unit is None:
        raise ValueError(f"cannot read {text!r} as a duration; write for example 10s, 100ms or 2min")
    seconds = number * unit
    if not least <= seconds <= MOST_SECONDS:
        bounds = f"it must be from {least:g} to {MOST_SECONDS} seconds"
        raise ValueError(f"{text!r} is out of bounds: {bounds}; write for example 10s, 100ms or 2min")
    return float(seconds)


def _quantity(text: str, units: Mapping[str, int] | Mapping[str, Fraction]) -> tuple[Fraction | None, Fraction | None]:
    # A number and what its unit stands for; None where one of them cannot be read. Exact: 0.1 is a tenth.
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or len(match.group(1)) > _MOST_DIGITS:
        return None, None
    unit = units.get(match.group(2).lower())
    return Fraction(match.group(1)), None if unit is None else Fraction(unit)


def format_bytes(count: int) -> str:
    """Print `count` bytes with three significant digits and a binary unit, as `"256 MiB"`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == int(size) or abs(size) >= 100 else f"{size:.3g} {unit}"
