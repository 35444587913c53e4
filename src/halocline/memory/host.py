"""The host arena: a second arena in host memory, and the work that a step does between it and the device's.

    device arena   |page|page|page|page| ...                     its slabs
                       | offloads  ^ loads
    host arena     |page|page|page|page| ...                     slabs of the same size, pools of the same pages

Same slab code, own quota: its slabs are `quota_bytes // slab_bytes`, so it can never hold more than it was given, and
no byte of it is counted in the device's arena. Two users share it: retracted decodes hold their pages by grants, the
prefix cache keeps what it has evicted as cached pages, which give way to any grant.

Whoever copies to the host makes room with `store`, which notes the work in its order: pages of the host may move first,
and a copy may land where another one was read. `take_work` gives it to the step that carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.figures import ArenaFigures
from halocline.memory.grant import Commit, Grant, Handles, Move, Order, Refusal
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import State
from halocline.units import ceil_div, format_bytes

Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What decides between copying pages and computing them again."""

    copy_bytes_per_second: float = 8e9
    """Of one copy between device and host, either way."""
    compute_tokens_per_second: float = 10e3
    """Of a prefill. Taken as constant: attention makes late tokens dearer, so copies are rather too seldom chosen."""
    link_bytes_per_second: float = 2e9
    """Of pages that another worker sends, their checksums and what stands in line for the link included."""

    def __post_init__(self) -> None:
        """Check that all are rates."""
        rates = (self.copy_bytes_per_second, self.compute_tokens_per_second, self.link_bytes_per_second)
        if not all(rate > 0 for rate in rates):
            raise ConfigError([f"{self}: all must be above 0"])

    def is_worth(self, copied_bytes: int, tokens: int) -> bool:
        """Whether copying so many bytes, all copies counted, takes less time than computing `tokens`.

        copied_bytes / copy_bytes_per_second < tokens / compute_tokens_per_second
        """
        return copied_bytes * self.compute_tokens_per_second < tokens * self.copy_bytes_per_second

    def is_worth_sending(self, copied_bytes: int, sent_bytes: int) -> bool:
        """Whether copying so many bytes takes less time than having `sent_bytes` sent by another worker.

        copied_bytes / copy_bytes_per_second < sent_bytes / link_bytes_per_second
        """
        return copied_bytes * self.link_bytes_per_second < sent_bytes * self.copy_bytes_per_second


@dataclass(frozen=True, slots=True, eq=False)
class HostCopies:
    """Copies of whole pages of one pool between the arenas: `device_pages[i]` and `host_pages[i]` are the same page.

    Shapes (pages,). No page of the side that is written is named twice.
    """

    pool: int
    device_pages: Places
    host_pages: Places


@dataclass(frozen=True, slots=True)
class HostMoves:
    """Pages that change place inside the host arena, all in one pass: sources and targets are disjoint."""

    moves: tuple[Move, ...]


HostWork = HostCopies | HostMoves


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """All that a request needs to go on at position `tokens`, in the host arena."""

    owner: str
    tokens: int
    """Positions that need not be computed again."""
    grant: Grant
    """Of the host arena; holds `handles`."""
    first_page: tuple[int, ...]
    """Per pool: the index of the first page within the request."""
    handles: tuple[Handles, ...]
    """Per pool, of the host arena."""


class HostArena:
    """The one owner of host memory. `arena` answers all questions; pages are committed through `store` only."""

    def __init__(self, layout: ArenaLayout, quota_bytes: int) -> None:
        """Lay out `quota_bytes` like the device's arena. Raises ConfigError when that is no whole slab."""
        self.arena = Arena(host_layout(layout, quota_bytes))
        self.quota_bytes = quota_bytes
        self.stored_pages = [0] * len(layout.pools)
        """Pages copied to the host since the start, per pool."""
        self._strides = [pool.stride_bytes for pool in layout.pools]
        self._work: list[HostWork] = []

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        """Promise pages of the host to `owner`: cached pages give way. All or nothing."""
        return self.arena.reserve(owner, demand)

    def store(self, grant: Grant, device_pages: Sequence[Places]) -> Commit:
        """Commit a host page of `grant` for each of `device_pages` (per pool) and note that they are copied there.

        Device pages are numbered as before the moves of the step that carries the work out. Returns the handles of
        `grant`, in their order, and what was evicted: tell the owner of the cached pages before anything else.
        """
        pages = Demand(map(len, device_pages))
        commit = self.arena.commit([Order(grant, pages)])
        if commit.moves:
            self._work.append(HostMoves(tuple(commit.moves)))
        handles = commit.handles[0]
        for pool, (numbers, stored) in enumerate(zip(device_pages, handles, strict=True)):
            if len(numbers):
                self._work.append(HostCopies(pool, numbers, self.arena.physical(pool, stored)))
                self.stored_pages[pool] += len(numbers)
        return commit

    def loads(self, pages: Sequence[Handles], device_pages: Sequence[Places]) -> tuple[HostCopies, ...]:
        """Return the copies (per pool) of host pages to `device_pages`, numbered as after the moves of their step.

        Ask when all work of the step is noted: host pages are numbered as after it. The host pages stay held, locked or
        pinned until the step has been applied.
        """
        return tuple(
            HostCopies(pool, numbers, self.arena.physical(pool, handles))
            for pool, (handles, numbers) in enumerate(zip(pages, device_pages, strict=True))
            if len(numbers)
        )

    def take_work(self) -> tuple[HostWork, ...]:
        """Return all noted work, once, in the order in which it must be done."""
        work = tuple(self._work)
        self._work.clear()
        return work

    def drop_work(self) -> None:
        """Forget noted work that nobody will carry out: whoever asked for it must not read what it names."""
        self._work.clear()

    @property
    def has_work(self) -> bool:
        """Whether noted work waits for a step."""
        return bool(self._work)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of so many pages per pool, strides counted whole."""
        return sum(count * stride for count, stride in zip(pages, self._strides, strict=True))

    def figures(self) -> ArenaFigures:
        """Return where every byte of the host arena is (L13)."""
        return self.arena.figures()


def read_span(pool: PoolLayout, computed: int) -> tuple[int, int]:
    """Return the pages [first, end) that a request reads when it goes on at position `computed`: what a copy keeps."""
    if isinstance(pool.retention, State):
        return 0, 1
    return pool.retention.first_needed(computed) // pool.page_tokens, ceil_div(computed, pool.page_tokens)


def host_layout(layout: ArenaLayout, quota_bytes: int) -> ArenaLayout:
    """Return the layout of a host arena of `quota_bytes`: the same slabs and pages, as many slabs as fit."""
    slabs = quota_bytes // layout.slab_bytes
    if slabs < 1:
        raise ConfigError(
            [
                f"host_bytes is {format_bytes(quota_bytes)} ({quota_bytes} bytes), less than one slab of "
                f"{layout.slab_bytes} bytes; give at least that, or 0 for no host arena"
            ]
        )
    return replace(layout, slabs=slabs, budget_bytes=quota_bytes)
