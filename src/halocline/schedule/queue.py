"""Who waits, most senior first: new requests and retracted ones in one line.

A retracted request keeps the seniority of its first arrival, so it stands before everyone who came later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from halocline.schedule.request import Request

_key = attrgetter("key")


class Line:
    """Requests in order of seniority. Keys are unique, so a request is found by halving."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        """Put `request` where its seniority belongs."""
        insort(self._requests, request, key=_key)

    def remove(self, request: Request) -> None:
        """Take `request` out; it must be there."""
        index = bisect_left(self._requests, request.key, key=_key)
        found = index < len(self._requests) and self._requests[index] is request
        assert found, f"request {request.id} is not in this line of {len(self._requests)}"
        del self._requests[index]

    def first(self) -> Request | None:
        """Return the most senior one, None when nobody is here."""
        return self._requests[0] if self._requests else None

    def place(self, request: Request) -> int:
        """Return how many stand before `request`."""
        return bisect_left(self._requests, request.key, key=_key)

    def juniors(self, request: Request) -> list[Request]:
        """Return everyone strictly junior to `request`, most senior first."""
        return self._requests[bisect_right(self._requests, request.key, key=_key) :]

    def snapshot(self) -> list[Request]:
        """Return the requests of this moment, most senior first."""
        return self._requests.copy()
