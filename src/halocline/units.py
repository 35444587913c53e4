"""The only rounding in the program, and the only reading and printing of byte counts.

Everything that turns tokens into pages, pages into slabs or bytes into text goes through here, so that no two
places can round the same number differently.
"""

from __future__ import annotations

import re

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

_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


def ceil_div(count: int, unit: int) -> int:
    """Return how many whole `unit`s hold `count`; both counts in the same unit, `unit` > 0."""
    return -(-count // unit)


def floor_to(count: int, unit: int) -> int:
    """Return the largest multiple of `unit` that is at most `count`."""
    return count // unit * unit


def ceil_to(count: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `count`."""
    return ceil_div(count, unit) * unit


def parse_bytes(text: str | int) -> int:
    """Read a byte count such as `"256MiB"`, `"2GiB"`, `"1.5 gb"` or a plain number of bytes.

    Raises ValueError with the accepted forms when `text` is none of them or is negative.
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a byte count cannot be negative: {text}")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _BYTE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {text!r} as bytes; write for example 268435456, 256MiB or 2GiB")
    return int(float(match.group(1)) * unit) if "." in match.group(1) else int(match.group(1)) * unit


def parse_seconds(text: str | float) -> float:
    """Read a duration such as `"10s"`, `"100ms"`, `"2min"` or a plain number of seconds, and return seconds.

    Raises ValueError with the accepted forms when `text` is none of them.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _TIME_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {text!r} as a duration; write for example 10s, 100ms or 2min")
    return float(match.group(1)) * unit


def format_bytes(count: int) -> str:
    """Print `count` bytes with three significant digits and a binary unit, as `"256 MiB"`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == int(size) or abs(size) >= 100 else f"{size:.3g} {unit}"
