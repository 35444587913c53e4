"""How pages come from a peer's arena by the NIXL library: out of staging memory, into the landing under its lock."""

from __future__ import annotations

from collections.abc import Sequence

from halocline.disagg import stream
from halocline.disagg.arena_pages import copy_and_sum
from halocline.disagg.arrivals import CLOSED, Line
from halocline.disagg.landings import Landing
from halocline.disagg.nixl_pull import Pulled
from halocline.disagg.staging import Claim
from halocline.errors import LinkError


class FromLibrary:
    """Pages are read from the peer's arena by a library, ahead of their checksums."""

    is_described = True

    def __init__(self, line: Line, pulled: Pulled) -> None:
        self._line, self._pulled = line, pulled

    def expect(self, numbers: Sequence[Sequence[int]]) -> None:
        """See `Source`."""
        for pool, each in enumerate(numbers):
            if each and not 0 <= min(each) <= max(each) < self._pulled.pages(pool):
                raise LinkError(f"the peer's pool {pool} has no page {min(each)} or {max(each)}")
        self._pulled.expect([(pool, number) for pool, each in enumerate(numbers) for number in each])

    def take(self, landing: Landing | None, group: stream.Group, index: int, numbers: Sequence[int]) -> str:
        """See `Source`."""
        del numbers  # they are known since `expect`
        line, pool, count = self._line, group.pool, group.pages
        if landing is None:
            self._pulled.leave()
            line.read_sums(count)
            return ""
        line.count_pages(pool, count)
        if line.are_equal[pool]:
            here = self._copy(landing, pool, line.home.landings.numbers(landing, pool, index, count))
            told = line.read_sums(count)
            return line.verdict(landing, group, index, here, told) if len(here) == count else CLOSED
        page, told = self._pulled.next_page(), line.read_sums(1)  # before room is claimed: others may need it

        def bring(claim: Claim) -> int:
            claim.room[:] = page
            return told[0]

        wrong = line.cut(landing, pool, index, bring)
        return CLOSED if wrong is None else wrong

    def _copy(self, landing: Landing, pool: int, targets: Sequence[int]) -> list[int | None]:
        """Copy the next pages into their landing; return the checksums of the copies, fewer where it was closed."""
        sums = list[int | None]()
        for target in targets:
            page = self._pulled.next_page()
            self._line.beat()
            with landing.lock:
                if not landing.is_open:
                    break
                sums.append(None if target < 0 else copy_and_sum(page, self._line.home.pages.page(pool, target)))
        return sums
