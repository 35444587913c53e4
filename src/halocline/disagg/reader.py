"""The reading half of a connection: frames become news, and pages come into their landing before they are told of."""

from __future__ import annotations

import numpy as np

from halocline.disagg import messages as wire
from halocline.disagg import stream
from halocline.disagg.actions import Key
from halocline.disagg.arrivals import Line, Source
from halocline.disagg.post import Delivered
from halocline.errors import LinkError


class Reader:
    """What comes in over one connection. Its thread runs `run`, which ends by an error."""

    def __init__(self, name: str, line: Line, source: Source, sizes: tuple[int, ...]) -> None:
        """`sizes`: pages of each of the peer's pools that make a group."""
        self._name, self._line, self._source, self._sizes = name, line, source, sizes

    def run(self) -> None:
        """Take frames until the end; raises LinkError, OSError or ValueError when it has come."""
        while True:
            frame = stream.receive_frame(self._line.sock)
            self._line.counts.received += frame.wire_bytes
            news = self._message(frame) if frame.kind == stream.MESSAGE else self._pages(frame)
            self._line.home.inbox.deliver(news, frame.wire_bytes, self._line.is_over)

    def _message(self, frame: stream.Frame) -> Delivered:
        message = wire.decode(frame.body)
        if isinstance(message, wire.Hello | wire.Pages):
            raise LinkError(f"a {type(message).__name__} came where none may come")
        return Delivered(self._name, message)

    def _pages(self, frame: stream.Frame) -> Delivered:
        body = stream.decode_pages(frame.body)
        pages = wire.decode(body.message)
        if not isinstance(pages, wire.Pages) or len(pages.runs) != len(self._sizes):
            raise LinkError("a frame of pages does not say which pages it brings")
        return Delivered(self._name, pages, self._bring(pages, self._numbers(pages, body)))

    def _numbers(self, pages: wire.Pages, body: stream.PagesBody) -> list[list[int]]:
        """Return the numbers of pages in the peer's arena, of each pool; none where pages come over the socket."""
        if not self._source.is_described:
            return [[] for _ in self._sizes]
        numbers = [np.frombuffer(each, np.int32).tolist() for each in body.numbers]
        if list(map(len, numbers)) != [run.pages for run in pages.runs]:
            raise LinkError("a frame of pages does not name as many pages as it announces")
        return numbers

    def _bring(self, pages: wire.Pages, numbers: list[list[int]]) -> str:
        """Bring a chunk's pages into their landing; return why they are not there, or an empty string."""
        landing = self._line.home.landings.find(Key(self._name, pages.request, pages.attempt))
        refused = "there is no landing for it" if landing is None else ""
        writes = None if landing is None or pages.chunk in landing.chunks else landing
        self._line.beat.begin()
        if writes is not None:
            self._source.expect(numbers)
        for group in stream.groups([run.pages for run in pages.runs], self._sizes):
            # To the last page also after a fault: a stream that is left half read is of no use to anybody.
            there = numbers[group.pool][group.first : group.first + group.pages]
            wrong = self._source.take(writes, group, pages.runs[group.pool].first_page + group.first, there)
            if wrong:
                refused, writes = wrong, None
            self._line.beat()
        if not refused and landing is not None:
            landing.chunks.add(pages.chunk)
        return refused
