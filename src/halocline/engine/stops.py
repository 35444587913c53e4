"""Stop strings: found wherever they stand across tokens, and never shown, not even in part.

Text is held back as long as it could be the beginning of a stop string:

    stop "END"     text  "the E" | "N" | "T. EN" | "D now"
    released             "the "  | ""  | "ENT. " | stop found; " now" is dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopFinder:
    """Watches one text for the stop string that is complete first (the longest of those complete at once)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return what may be shown now; sets `found` when a stop string is complete."""
        assert self.found is None, f"text after the stop string {self.found!r}"
        if not self._stops:
            return text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            found = self._step(character)
            if found is not None:
                self.found, self._held = found, ""
                return buffer[: end - len(found)]
        keep = max(self._matched)
        assert keep <= len(buffer), f"{keep} characters match, but only {len(buffer)} have come"
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Return what was held back: the text has ended, and it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every matcher by one character (Knuth, Morris, Pratt); return the stop string that is complete."""
        complete: list[str] = []
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._borders[i][matched - 1]
            matched += stop[matched] == character
            self._matched[i] = matched
            if matched == len(stop):
                complete.append(stop)
        return max(complete, key=len, default=None)


@lru_cache(maxsize=1024)  # one request has up to a thousand sequences with the same stops
def _borders(stop: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return tuple(borders)
