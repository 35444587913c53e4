"""Pages of the token oracle that travel: what is read of them, and landings into which they are written.

The oracle keeps two words per position, so a page of T positions is (T, 2) words. Pages of another length are cut anew
by position, as the real landings do with bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.network import Cargo
from halocline.memory.layout import PoolLayout
from halocline.schedule.events import PoolPages
from halocline.sim.oracle import FakeBackend

Watch = Callable[[Key, int, NDArray[np.int64]], None]
"""Called with the key, pool and page numbers of everything that is about to be written."""


@dataclass(eq=False)
class Landing:
    """One open landing."""

    pools: tuple[PoolPages, ...]
    lacking: list[NDArray[np.bool_]]
    """Per pool and position of its pages: whether it must come and has not."""
    chunks: set[int]


class WordMemory:
    """One process's pages: the memory of a simulated post, and the landings of its exchange."""

    def __init__(self, backend: FakeBackend, watch: Watch) -> None:
        self.backend = backend
        self._watch = watch
        self.landings: dict[Key, Landing] = {}

    # ---- the exchange's side

    def open(self, key: Key, start_tokens: int, fill_tokens: int, pools: tuple[PoolPages, ...]) -> None:
        """Let a chunk's words be written from now on."""
        layouts = [pool.pool for pool in self.backend.pools]
        lacking = [_lacking(layout, run, start_tokens, fill_tokens) for layout, run in zip(layouts, pools, strict=True)]
        self.landings[key] = Landing(pools, lacking, set())

    def close(self, key: Key) -> None:
        """Let nothing be written any more."""
        self.landings.pop(key, None)

    def missing(self, key: Key) -> int:
        """Return how many positions of a landing were not written yet; states count as one."""
        return sum(int(lacking.sum()) for lacking in self.landings[key].lacking)

    # ---- the network's side

    def read(self, runs: Sequence[PoolPages]) -> Cargo:
        """Return a copy of pages, (pages, page_tokens, 2) words per pool."""
        return tuple(
            np.stack((pool.raw[run.pages], pool.deep[run.pages]), axis=-1)
            for pool, run in zip(self.backend.pools, runs, strict=True)
        )

    def write(self, key: Key, pages: wire.Pages, cargo: Cargo, source: wire.PeerFacts) -> str:
        """Write one chunk into its landing."""
        del source  # the shape of the words says it all
        landing = self.landings.get(key)
        if landing is None:
            return "its landing is closed"
        if pages.chunk in landing.chunks:
            return ""
        landing.chunks.add(pages.chunk)
        for number, (run, words) in enumerate(zip(pages.runs, cargo, strict=True)):
            self._write_pool(key, landing, number, run.first_page, words)
        return ""

    def _write_pool(self, key: Key, landing: Landing, number: int, first_page: int, words: NDArray[np.uint64]) -> None:
        pool, own = self.backend.pools[number], landing.pools[number]
        page_tokens = pool.pool.page_tokens
        begin = first_page * words.shape[1]
        positions = np.arange(begin, begin + words.shape[0] * words.shape[1]) - own.first_page * page_tokens
        inside = (positions >= 0) & (positions < len(own.pages) * page_tokens)
        positions, words = positions[inside], words.reshape(-1, 2)[inside]
        if not len(positions):
            return
        targets = own.pages.astype(np.int64)[positions // page_tokens]
        self._watch(key, number, np.unique(targets))
        self.backend.claim(number, targets)
        pool.raw[targets, positions % page_tokens] = words[:, 0]
        pool.deep[targets, positions % page_tokens] = words[:, 1]
        landing.lacking[number][positions] = False


def _lacking(layout: PoolLayout, run: PoolPages, start_tokens: int, fill_tokens: int) -> NDArray[np.bool_]:
    """Return which positions of a run must come: not what is here already, nor what no later token reads."""
    if not layout.is_positional:
        return np.ones(len(run.pages), dtype=np.bool_)
    begin = run.first_page * layout.page_tokens
    positions = np.arange(begin, begin + len(run.pages) * layout.page_tokens)
    low = max(start_tokens, layout.retention.first_needed(fill_tokens))  # type: ignore[union-attr]
    return (positions >= low) & (positions < fill_tokens)
