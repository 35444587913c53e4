"""Pages that are copied out of a peer's arena, which is mapped here: by two threads, where there are cores for them.

Each page is summed right after it was copied, where it arrived: its bytes may be another request's by now.
"""

from __future__ import annotations

from collections.abc import Sequence

from halocline.disagg import stream
from halocline.disagg.arena_pages import HOT_BYTES, ArenaPages, checksum, copy_and_sum
from halocline.disagg.arrivals import CLOSED, Line
from halocline.disagg.landings import Landing
from halocline.disagg.staging import Claim
from halocline.errors import LinkError


class FromArena:
    """Pages lie in the peer's arena, which is mapped here."""

    is_described = True

    def __init__(self, line: Line, mapped: ArenaPages) -> None:
        self._line, self._mapped = line, mapped

    def expect(self, numbers: Sequence[Sequence[int]]) -> None:
        """They lie there already."""

    def take(self, landing: Landing | None, group: stream.Group, index: int, numbers: Sequence[int]) -> str:
        """See `Source`."""
        line, (pool, _, count) = self._line, group
        if min(numbers) < 0 or max(numbers) >= self._mapped.pages(pool):
            raise LinkError(f"the peer's pool {pool} has no page {min(numbers)} or {max(numbers)}")
        if landing is None:
            line.read_sums(count)
            return ""
        line.count_pages(pool, count)
        if line.are_equal[pool]:
            return self._take_over(landing, group, index, numbers)
        told = line.read_sums(1)[0]

        def bring(claim: Claim) -> int:
            claim.room[:] = self._mapped.page(pool, numbers[0])
            return told

        wrong = line.cut(landing, pool, index, bring)
        return CLOSED if wrong is None else wrong

    def _take_over(self, landing: Landing, group: stream.Group, index: int, numbers: Sequence[int]) -> str:
        here: list[int | None] = []
        with landing.lock:
            if landing.is_open:
                targets = self._line.home.landings.numbers(landing, group.pool, index, group.pages)
                here = self._copy(group.pool, numbers, targets)
        told = self._line.read_sums(group.pages)
        return self._line.verdict(landing, group, index, here, told) if here else CLOSED

    def _copy(self, pool: int, numbers: Sequence[int], targets: Sequence[int]) -> list[int | None]:
        """Copy pages out of the peer's arena; return the checksums of the copies, None for what belongs nowhere."""
        own, mapped = self._line.home.pages, self._mapped
        sums: list[int | None] = [None] * len(numbers)

        def copy(piece: tuple[int, int]) -> None:
            begin, end = piece
            there, here = numbers[begin], targets[begin]
            if end - begin == 1:
                sums[begin] = copy_and_sum(mapped.page(pool, there), own.page(pool, here))
            else:
                own.span(pool, here, end - begin)[:] = mapped.span(pool, there, end - begin)
                sums[begin:end] = [checksum(own.page(pool, number)) for number in targets[begin:end]]

        self._line.home.helper.share(copy, self._pieces(pool, numbers, targets))
        return sums

    def _pieces(self, pool: int, numbers: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int]]:
        """Return (begin, end) of places whose pages lie in a row on both sides, and fit the cache."""
        pieces = []
        for begin, end in self._line.home.pages.spans(pool, targets, HOT_BYTES):
            if targets[begin] >= 0:
                spans = self._mapped.spans(pool, numbers[begin:end], HOT_BYTES)
                pieces += [(begin + first, begin + stop) for first, stop in spans]
        return pieces
