"""How long one side waits for the other: leases that progress renews, and timers for saying a thing again.

A lease bounds what cannot be retracted (pins, landings). It is renewed by nothing but progress, and every measure of
progress here is a natural number that must fall, or a thing that can happen once: so whoever holds a lease holds it for
`seconds` times a bounded number at the most, also when the peer's connection lives and its work does not.
"""

from __future__ import annotations

RESENDS_PER_LEASE = 8
"""A message without an answer is said so often before the lease ends."""


class Lease:
    """The right to wait until a moment. Times are in seconds of the caller's clock, which must never go back."""

    def __init__(self, now: float, seconds: float) -> None:
        assert seconds > 0, f"a lease of {seconds} s would be over at once"
        self._seconds = seconds
        self._left: int | None = None
        self.ends_at = now + seconds

    def renew(self, now: float) -> None:
        """Something came that can come but once."""
        self.ends_at = now + self._seconds

    def report(self, left: int, now: float) -> bool:
        """Renew the lease when `left`, what is yet to be done, is below all that was reported; return whether it is."""
        falls = self._left is None or left < self._left
        if falls:
            self._left = left
            self.renew(now)
        return falls

    def is_over(self, now: float) -> bool:
        """Whether the time is up."""
        return now >= self.ends_at


class Repeat:
    """When to say a thing again that was not answered."""

    def __init__(self, now: float, seconds: float) -> None:
        self._seconds = seconds
        self._next = now + seconds

    def is_due(self, now: float) -> bool:
        """Whether it is time; the next time is one period later."""
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
