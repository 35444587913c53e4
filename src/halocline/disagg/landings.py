"""Where pages of other workers may be written, and until when: the fence of the receiving side.

A landing is the set of pages that a received prompt will have. Links write under its lock only, while it is open, and a
piece at a time: what one call reads off a socket, a group that is pulled, a page that is cut. `close` waits for a piece
at most, and after it nobody writes any more: the scheduler may give the pages to others. What a peer says of its pages
is believed as far as it is inside the landing. Pages are checked before they count; those that are taken over as they
are, where they stand, and those that have to be cut before that:

    own pages of a pool    |  page 3   |  page 4   |  page 5   |      what must be there: positions [from, fill)
    peer's pages             | 12 | 13 | 14 | 15 | 16 | 17 |           each is checked first, then cut and counted
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages, Bytes, copy_positions
from halocline.disagg.messages import PoolFacts, has_equal_pages
from halocline.memory.layout import PoolLayout
from halocline.memory.retention import State
from halocline.schedule.events import PoolPages
from halocline.units import floor_to

ABSENT = -2
"""In place of the number of a page: none belongs there. Adjacent to no page, nor to itself."""


class PoolLanding:
    """One pool of a landing: its pages, and which positions are there."""

    def __init__(self, layout: PoolLayout, facts: PoolFacts, pages: PoolPages, fill_tokens: int) -> None:
        self.facts, self.pages, self.is_positional = facts, pages, layout.is_positional
        self.begin = pages.first_page * facts.page_tokens
        self.end = min(fill_tokens, self.begin + len(pages.pages) * facts.page_tokens)
        needed = 0 if isinstance(layout.retention, State) else layout.retention.first_needed(fill_tokens)
        if not self.is_positional:
            self.begin, self.end = 0, len(pages.pages)
        self.has = np.zeros(max(0, self.end - self.begin), np.bool_)
        self.has[: max(0, needed - self.begin)] = True

    @property
    def missing(self) -> int:
        """Positions (or states) that nobody has written yet."""
        return int(len(self.has) - self.has.sum())


@dataclass
class Landing:
    """The pages of one attempt."""

    pools: tuple[PoolLanding, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True
    chunks: set[int] = field(default_factory=set)
    """Chunks that are there; one that comes again is not written again."""


class Landings:
    """All landings of one worker. Every method may be called from any thread."""

    def __init__(self, own: ArenaPages, layouts: tuple[PoolLayout, ...]) -> None:
        self._own = own
        self._layouts = layouts
        self._lock = threading.Lock()
        self._landings: dict[Key, Landing] = {}

    def open(self, key: Key, start_tokens: int, fill_tokens: int, pools: tuple[PoolPages, ...]) -> None:
        """Let pages of this attempt be written from now on; they hold positions up to `fill_tokens`."""
        del start_tokens  # the first page of each pool says it
        made = zip(self._layouts, self._own.pools, pools, strict=True)
        landing = Landing(tuple(PoolLanding(layout, facts, pages, fill_tokens) for layout, facts, pages in made))
        with self._lock:
            self._landings[Key(*key)] = landing

    def close(self, key: Key) -> None:
        """When this returns, nobody writes into the landing any more. An unknown key is closed already."""
        with self._lock:
            landing = self._landings.pop(Key(*key), None)
        if landing is not None:
            with landing.lock:
                landing.is_open = False

    def missing(self, key: Key) -> int:
        """Return how many positions and states nobody has written yet; an unknown landing misses one."""
        with self._lock:
            landing = self._landings.get(Key(*key))
        return 1 if landing is None else sum(pool.missing for pool in landing.pools)

    def find(self, key: Key) -> Landing | None:
        """Return the open landing of an attempt."""
        with self._lock:
            return self._landings.get(Key(*key))

    def target(self, landing: Landing, pool: int, theirs: PoolFacts, index: int) -> Bytes | None:
        """Return the own page that a peer's page fills byte by byte; None where it must be cut or does not belong.

        To be asked, and written to, under the landing's lock and while it is open.
        """
        here = landing.pools[pool]
        place = index - here.pages.first_page
        if not 0 <= place < len(here.pages.pages) or not has_equal_pages(here.facts, theirs):
            return None
        return self._own.page(pool, int(here.pages.pages[place]))

    def numbers(self, landing: Landing, pool: int, index: int, count: int) -> list[int]:
        """Return the own pages for `count` indices of the request from `index` on; `ABSENT` where none belongs.

        They hold as long as the landing is open.
        """
        here = landing.pools[pool].pages
        first = index - here.first_page
        kept: list[int] = here.pages[max(0, first) : max(0, first + count)].tolist()
        before = min(count, max(0, -first))
        return [ABSENT] * before + kept + [ABSENT] * (count - before - len(kept))

    def confirm(self, landing: Landing, pool: int, index: int, count: int) -> bool:
        """Note that pages which were written where `numbers` said are right, unless the landing was closed."""
        here = landing.pools[pool]
        tokens = here.facts.page_tokens if here.is_positional else 1
        at = (index - here.pages.first_page) * tokens
        with landing.lock:
            if landing.is_open:
                here.has[max(0, at) : max(0, at + count * tokens)] = True
            return landing.is_open

    def write(self, landing: Landing, pool: int, theirs: PoolFacts, index: int, page: Bytes) -> None:
        """Write a peer's page, which has been checked, into own pages of any length, as far as it belongs there."""
        with landing.lock:
            if not landing.is_open:
                return
            target = self.target(landing, pool, theirs, index)
            here = landing.pools[pool]
            if target is not None:
                target[:] = page
                tokens = here.facts.page_tokens if here.is_positional else 1
                at = (index - here.pages.first_page) * tokens
                here.has[at : at + tokens] = True
            elif here.is_positional:
                self._cut(here, pool, theirs, index, page)

    def _cut(self, here: PoolLanding, pool: int, theirs: PoolFacts, index: int, page: Bytes) -> None:
        """Copy the positions of a peer's page that lie in the landing, own page by own page."""
        begin = max(here.begin, index * theirs.page_tokens)
        end = min(here.end, (index + 1) * theirs.page_tokens)
        own_tokens = here.facts.page_tokens
        while begin < end:
            stop = min(end, floor_to(begin, own_tokens) + own_tokens)
            number = here.pages.pages[begin // own_tokens - here.pages.first_page]
            target = self._own.page(pool, int(number))
            places = begin - index * theirs.page_tokens, begin % own_tokens
            copy_positions(page, theirs, places[0], target, here.facts, places[1], stop - begin)
            here.has[begin - here.begin : stop - here.begin] = True
            begin = stop
