"""The head of a stream is held back until its first token, and every event is passed on whole.

While a client has got nothing, its request can still be tried elsewhere. A stream's beginning says nothing yet: a chat
answer opens with the role before anything was computed, and then an error may follow. Afterwards an event goes on as
soon as its last byte is here; an event that was cut off by a dying worker never does, so that a client which is told of
the fault can read that.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

END = b"\n\n"
MOST_HELD_BYTES = 1 << 20
"""A beginning, or one event, that is longer than this is passed on as it comes."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error that came before the first token."""

    code: str | None
    message: str


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    error: _Error | None = None
    choices: list[_Choice] | None = None


_decoder = msgspec.json.Decoder(_Event)


class Hold:
    """One stream on its way through; `feed` returns what may be passed on."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._looked = 0
        """Bytes of the head that hold nothing but openings."""
        self.is_open = False
        """Whether something was passed on."""
        self.is_torn = False
        """Whether part of an event was passed on: after that no event of ours can follow."""
        self.error: ErrorEvent | None = None
        """Set when the head ended with an error instead of a token."""

    def feed(self, data: bytes) -> bytes:
        """Take in bytes; return those that go to the client now, maybe none. After an error, nothing."""
        if self.is_open and not self._held and data.endswith(END):
            self.is_torn = False
            return data
        self._held += data
        if not self.is_open:
            self._look()
            if not self.is_open:
                return b""
        return self._take(self._held.rfind(END) + len(END) if END in self._held else 0)

    def let_go(self) -> bytes:
        """Pass on an error after all."""
        self.is_open, self.error = True, None
        return self.feed(b"")

    def end(self) -> bytes:
        """Return what is left when the stream has ended in order."""
        self.is_open = self.is_open or self.error is None
        rest = bytes(self._held) if self.is_open else b""
        self._held.clear()
        return rest

    def _look(self) -> None:
        """Look at the events of the head until one says something."""
        while (at := self._held.find(END, self._looked)) >= 0 and self.error is None:
            event = bytes(self._held[self._looked : at])
            kind = _read(event)
            if isinstance(kind, ErrorEvent):
                self.error = kind
                return
            if kind != "opening":
                self.is_open = True
                return
            self._looked = at + len(END)
        self.is_open = len(self._held) > MOST_HELD_BYTES and self.error is None

    def _take(self, size: int) -> bytes:
        if size:
            self.is_torn = False
        elif len(self._held) > MOST_HELD_BYTES:
            size, self.is_torn = len(self._held), True
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken


def _read(event: bytes) -> ErrorEvent | str:
    """Return the error of an event, "opening" when it says nothing yet, else "speaks"."""
    lines = [line.removeprefix(b"data:") for line in event.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return "opening"  # a comment, which keeps a connection alive
    try:
        read = _decoder.decode(b"\n".join(lines))
    except msgspec.MsgspecError:
        return "speaks"
    if read.error is not None:
        return ErrorEvent(read.error.code, read.error.message)
    is_opening = bool(read.choices) and all(
        each.delta is not None and not each.delta.content and each.finish_reason is None for each in read.choices or ()
    )
    return "opening" if is_opening else "speaks"
