"""Stretches of memory that a part of a stream fills, or comes from, in order: several pages by one system call."""

from __future__ import annotations

from collections.abc import Iterable

MOST_PARTS = 256
"""So many stretches are given to the system at once; it takes 1024 at most."""
_NOTHING = memoryview(bytearray(1 << 16))
"""Where bytes go that nobody wants. All threads write into it and nobody reads it."""
_ZEROS = memoryview(bytes(1 << 16))


class Stretches:
    """What is yet to be filled, or sent, of a row of stretches."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        """`views`: writable, or readable, stretches of bytes."""
        self._views = list(views)
        self._at = 0
        self.left_bytes = sum(map(len, self._views))

    def ahead(self, most_bytes: int) -> list[memoryview]:
        """Return what comes next, up to `most_bytes` and in `MOST_PARTS` parts at most."""
        found: list[memoryview] = []
        for view in self._views[self._at : self._at + MOST_PARTS]:
            found.append(view[:most_bytes])
            most_bytes -= len(found[-1])
            if most_bytes <= 0:
                break
        return found

    def skip(self, size: int) -> None:
        """Go on behind the next `size` bytes."""
        assert size <= self.left_bytes, f"{size} bytes are more than the {self.left_bytes} that are left"
        self.left_bytes -= size
        while size:
            view = self._views[self._at]
            if size < len(view):
                self._views[self._at] = view[size:]
                return
            size -= len(view)
            self._at += 1


def unwanted(size: int) -> list[memoryview]:
    """Return stretches for `size` bytes that nobody wants."""
    return _repeated(_NOTHING, size)


def zeros(size: int) -> list[memoryview]:
    """Return stretches of `size` zeros, for sending."""
    return _repeated(_ZEROS, size)


def _repeated(view: memoryview, size: int) -> list[memoryview]:
    rest = size % len(view)
    return [view] * (size // len(view)) + ([view[:rest]] if rest else [])
