"""The token oracle on bytes that travel: its words lie in one arena of bytes, and land through the real landings.

Every pool has one layer of one head with one key and one value of eight bytes per position: the oracle's two words. So
pages overlap as they do in a real arena, pages of another length are cut as real ones are, and whoever writes a byte
into a page that is another's changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages, Bytes
from halocline.disagg.landings import Landings
from halocline.disagg.simulated import Cargo
from halocline.memory.layout import ArenaLayout
from halocline.schedule.events import PoolPages
from halocline.sim.oracle import FakeBackend

WORD_BYTES = 8
Watch = Callable[[Key, int, list[int]], None]
"""Called with the key, pool and page numbers of everything that may be written next."""


class ByteBackend(FakeBackend):
    """The oracle with its words in one array of bytes."""

    def __init__(
        self, layout: ArenaLayout, vocab_size: int, eos: tuple[int, ...] = (), arena: Bytes | None = None
    ) -> None:
        """`arena`: memory to use, shape (arena bytes,), which other processes may see; None: its own."""
        super().__init__(layout, vocab_size, eos)
        self.arena: Bytes = np.empty(layout.arena_bytes, np.uint8) if arena is None else arena
        self.arena[:] = 0xBD
        for pool in self.pools:
            pool.raw = self._view(pool.raw.shape, pool.pool.stride_bytes, 0)
            pool.deep = self._view(pool.raw.shape, pool.pool.stride_bytes, pool.pool.page_tokens * WORD_BYTES)

    def _view(self, shape: tuple[int, ...], stride_bytes: int, offset: int) -> NDArray[np.uint64]:
        """Return one word per page and position, `offset` bytes behind the beginning of each page."""
        return np.ndarray(shape, np.uint64, self.arena.data, offset, (stride_bytes, WORD_BYTES))

    def claim(self, pool: int, pages: NDArray[np.int64]) -> None:  # type: ignore[explicit-override] # of Python 3.12
        """Ruin nothing: what another pool left in a slab is overwritten as bytes are."""


class ByteMemory:
    """One process's pages: the memory of a simulated post, and the landings of its exchange."""

    def __init__(self, backend: ByteBackend, facts: wire.PeerFacts, watch: Watch) -> None:
        self._watch = watch
        self._facts = facts
        self.pages = ArenaPages(backend.arena, facts.pools)
        self._strided = [
            backend.arena.reshape(-1, pool.stride_bytes)[:, : pool.page_bytes] for pool in backend.layout.pools
        ]
        self.landings = self.make_landings(self.pages, backend.layout)

    def make_landings(self, pages: ArenaPages, layout: ArenaLayout) -> Landings:
        """Return the landings; a place for a test's wrong ones."""
        return Landings(pages, layout.pools)

    def read(self, runs: Sequence[PoolPages]) -> Cargo:
        """Return a copy of pages, shape (pages, page_bytes) per pool."""
        return tuple(strided[run.pages] for strided, run in zip(self._strided, runs, strict=True))

    def write(self, key: Key, pages: wire.Pages, cargo: Cargo, source: wire.PeerFacts) -> str:
        """Write one chunk into its landing, a page at a time as links do."""
        landing = self.landings.find(key)
        if landing is None:
            return "its landing is closed"
        if pages.chunk in landing.chunks:
            return ""
        for number, (run, copied, theirs) in enumerate(zip(pages.runs, cargo, source.pools, strict=True)):
            self._watch(key, number, landing.pools[number].pages.pages.tolist())
            for index, page in enumerate(copied, run.first_page):
                self.landings.write(landing, number, theirs, index, page)
        landing.chunks.add(pages.chunk)
        return ""
