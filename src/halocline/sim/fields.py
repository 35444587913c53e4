"""Values of a workload file, checked: whole numbers, times, and the list of everything that is wrong with a file.

A reader raises `Fault` at the line it cannot use; `Faults` gathers these, so that a person who mends a file sees its
first ten faults at once, each with file and line, what was found there and what to do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from halocline.errors import ConfigError
from halocline.units import parse_number, parse_whole

MOST_TOKENS = 2**24
"""No prompt or output is longer: the longest published context is 10 million tokens."""
LATEST_SECONDS = 1e11
"""No time is later. Unix seconds reach this in the year 5138; a larger number is milliseconds or garbage."""
SHOWN_FAULTS = 10
QUOTED_CHARACTERS = 60
_MAY_BE_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character beyond the first 65,536, as JSON writes these. Alone it is no text: nothing can encode it."""


class Fault(Exception):
    """What is wrong with one line and what to do about it."""


class Faults:
    """The faults of one file, raised together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[str] = []

    def add(self, line: int, fault: Exception) -> None:
        """Note a fault; raises ConfigError when enough are known to stop reading."""
        self.found.append(f"{self.path}, line {line}: {fault}")
        if len(self.found) == SHOWN_FAULTS:
            raise ConfigError([*self.found, "there may be more; reading stopped here"])

    def raise_any(self) -> None:
        """Raise ConfigError with all faults, if there are any."""
        if self.found:
            raise ConfigError(self.found)


def quoted(value: object) -> str:
    """Return a value as it is shown in a message: cut where it is long."""
    text = repr(value)
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}..."


def tokens_of(value: object, name: str, least: int = 1) -> int:
    """Return a number of tokens, from `least` to MOST_TOKENS. Raises Fault."""
    number = value
    if isinstance(value, str):
        with suppress(ValueError):  # it is no number then, and told as it was found
            text = value.strip()
            number = -parse_whole(text[1:]) if text.startswith("-") else parse_whole(text)
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise Fault(f"{name} is {quoted(value)}; write a whole number of tokens")
    if number < least:
        raise Fault(f"{name} is {quoted(value)}; it must be at least {least}: mend the line or leave it out")
    if number > MOST_TOKENS:
        raise Fault(f"{name} is {quoted(value)}, and no model takes more than {MOST_TOKENS} tokens: leave the line out")
    return number


def seconds_of(value: object, name: str, unit: float = 1.0) -> float:
    """Return a time in seconds: a number in units of `unit` seconds, or an ISO 8601 date and time. Raises Fault."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Fault(
            f"{name} is {quoted(value)}; write seconds as a number, or a date and time (2023-11-16 18:15:46.68)"
        )
    try:
        seconds = (parse_number(value) if isinstance(value, str) else float(value)) * unit
    except OverflowError:
        seconds = math.inf
    except ValueError:
        seconds = _instant(str(value), name)
    if not math.isfinite(seconds) or abs(seconds) > LATEST_SECONDS:
        raise Fault(f"{name} is {quoted(value)}; write seconds (milliseconds must be divided by 1,000)")
    return seconds


def _instant(text: str, name: str) -> float:
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        message = f"{name} is {quoted(text)}; write seconds as a number, or a date and time (2023-11-16 18:15:46.68)"
        raise Fault(message) from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is not blank. Raises ConfigError when the file cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                text = line.strip()
                if text:
                    yield number, text
    except FileNotFoundError:
        raise ConfigError([f"{path} does not exist; give the path of a trace, or the name of a generator"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read as text: {error}"]) from None


def object_of(text: str) -> dict[str, object]:
    """Return the JSON object of one line. Raises Fault."""
    try:
        value = json.loads(text)
        if _MAY_BE_HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Fault(
            f"this has half a character (\\ud800 to \\udfff alone): {quoted(text)}; mend it or leave it out"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Fault(f"this is no JSON ({error}): {quoted(text)}; write one object per line") from None
    if not isinstance(value, dict):
        raise Fault(f"this is {quoted(value)}; write one JSON object per line")
    return value


def field_of(value: dict[str, object], name: str) -> object:
    """Return a field that must be there. Raises Fault."""
    if name not in value:
        raise Fault(f"the field {name!r} is missing; found {quoted(', '.join(sorted(value)))}")
    return value[name]
