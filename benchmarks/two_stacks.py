"""Two stacks that grow towards each other, with a float between them where there is a third kind: a rival of slabs.

What the shipped scheduler took and gave back of an arena is written down (`recording`) and put into stacks (`replay`):
how many bytes they move, and how often nothing fits without compaction. `memory_designs.py` runs it.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from halocline.memory.grant import Commit, Grant, Handles, Order
from halocline.memory.layout import ArenaLayout
from halocline.units import GIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the policies exist in tests only

from testing.policies import KeepingArena

Json = dict[str, object]


@dataclass
class History:
    """Pages in the order in which they were taken and given back; what came together stands together."""

    page_bytes: list[int]
    arena_bytes: int
    events: list[tuple[str, int, list[int], list[str]]] = field(default_factory=list)
    """("take" or "give", pool, handles, owners of what was taken)."""
    moved_bytes: int = 0
    """What the slabs moved meanwhile."""

    @property
    def written_bytes(self) -> int:
        """Bytes of all pages that were taken."""
        return sum(len(handles) * self.page_bytes[pool] for kind, pool, handles, _ in self.events if kind == "take")


def recording(base: type, history: list[History]) -> type:
    """Return an arena that writes down its pages' comings and goings."""

    class Recording(base):  # type: ignore[misc,valid-type]
        """Tells `history` of every commit, and of every page that goes."""

        def __init__(self, layout: ArenaLayout, caps: tuple[int | None, ...] | None = None) -> None:
            super().__init__(layout, caps)
            history.append(History([pool.stride_bytes for pool in layout.pools], layout.arena_bytes))
            self.book = history[-1]

        def commit(self, orders: Sequence[Order]) -> Commit:
            """Commit, and write down what died for it and what was taken."""
            done = super().commit(orders)
            for pool, died in enumerate(done.evicted):
                self._note("give", pool, died)
            for pool in range(len(self.pools)):
                handles = [handles[pool] for handles in done.handles]
                owners = [order.grant.owner for order, part in zip(orders, handles, strict=True) for _ in part]
                if owners:
                    self.book.events.append(("take", pool, np.concatenate(handles).tolist(), owners))
            self.book.moved_bytes += sum(self.book.page_bytes[move.pool] for move in done.moves)
            return done

        def free(self, grant: Grant, pool: int, handles: Handles) -> None:
            """Free, and write it down."""
            self._note("give", pool, handles)
            super().free(grant, pool, handles)

        def release(self, grant: Grant) -> None:
            """Release; what is freed by it is written down, what an arena keeps is not."""
            if not issubclass(base, KeepingArena):
                for pool in self.pools:
                    if grant.pages(pool.number):
                        self._note("give", pool.number, pool.handle_of[self.owners.indices_of(grant, pool)])
            super().release(grant)

        def _note(self, kind: str, pool: int, handles: Handles) -> None:
            if len(handles):
                self.book.events.append((kind, pool, handles.tolist(), []))

    return Recording


class Run:
    """Pages of one kind in a row of slots, with holes. A stack's slot 0 stays at its end; a float has two ends."""

    def __init__(self, page_bytes: int, *, is_stack: bool) -> None:
        self.page_bytes = page_bytes
        self.is_stack = is_stack
        self.low = self.high = 0
        """Slots [low, high) are the run's; a float's may be negative."""
        self.slot_of: dict[int, int] = {}
        self.handle_at: dict[int, int] = {}
        self._holes: list[int] = []

    @property
    def holes(self) -> int:
        """Slots of the run without a page."""
        return self.high - self.low - len(self.slot_of)

    def put(self, handle: int, slot: int) -> None:
        """Let `handle` lie at `slot`, which is a hole or next to the run."""
        self.low, self.high = min(self.low, slot), max(self.high, slot + 1)
        self.slot_of[handle], self.handle_at[slot] = slot, handle

    def hole(self) -> int | None:
        """Return the lowest hole, or None."""
        while self._holes:
            slot = self._holes[0]
            if self.low <= slot < self.high and slot not in self.handle_at:
                return slot
            heapq.heappop(self._holes)
        return None

    def give(self, handle: int) -> None:
        """Free the page of `handle`; holes at the ends are not the run's any more."""
        slot = self.slot_of.pop(handle)
        del self.handle_at[slot]
        heapq.heappush(self._holes, slot)
        self.trim()

    def trim(self) -> None:
        """Let go of holes at the ends."""
        while self.high > self.low and self.high - 1 not in self.handle_at:
            self.high -= 1
        while not self.is_stack and self.high > self.low and self.low not in self.handle_at:
            self.low += 1

    def move_end(self, at_high: bool, slot: int) -> int:
        """Move the page at one end to `slot`; return the bytes that moved."""
        source = self.high - 1 if at_high else self.low
        handle = self.handle_at.pop(source)
        self.put(handle, slot)
        self.trim()
        return self.page_bytes


class Stacks:
    """Pool 0 grows from the bottom, the last pool from the top, a third one floats in between.

    As kind as such a design can be: holes are used first, lowest first; nothing is moved before it must be, and then
    only as many pages as it takes, from the frontier into holes. Bytes are exact, page strides have no slab to fit.
    """

    def __init__(self, page_bytes: list[int], arena_bytes: int) -> None:
        self.arena_bytes = arena_bytes
        floats = len(page_bytes) == 3
        self.runs = [Run(size, is_stack=not (floats and pool == 1)) for pool, size in enumerate(page_bytes)]
        self.bottom, self.top = self.runs[0], self.runs[-1]
        self.floating = self.runs[1] if floats else None
        self.origin = arena_bytes // 2  # byte at which the float's slot 0 begins
        self.moved_bytes = 0
        self.unplaced = 0

    def gaps(self) -> tuple[int, int]:
        """Return the free bytes below and above the float; the same number twice without one."""
        low, high = self.bottom.high * self.bottom.page_bytes, self.arena_bytes - self.top.high * self.top.page_bytes
        if self.floating is None or not self.floating.slot_of:
            return high - low, high - low
        size = self.floating.page_bytes
        return self.origin + self.floating.low * size - low, high - self.origin - self.floating.high * size

    def take(self, pool: int, handles: list[int]) -> bool:
        """Place pages; return whether that went without moving any."""
        run, moved = self.runs[pool], self.moved_bytes
        for handle in handles:
            slot = run.hole()
            if slot is None:
                slot = self._float_slot(run) if run is self.floating else self._stack_slot(run)
            run.put(handle, slot)
        return moved == self.moved_bytes

    def _stack_slot(self, run: Run) -> int:
        below = run is self.bottom
        while self.gaps()[0 if below else 1] < run.page_bytes:
            if not self._make_way(below):
                self.unplaced += 1
                break
        return run.high

    def _float_slot(self, run: Run) -> int:
        if not run.slot_of:
            low = self.bottom.high * self.bottom.page_bytes
            self.origin, run.low, run.high = low + (self.gaps()[0] // 2), 0, 0
        while max(self.gaps()) < run.page_bytes:
            if not (self._compact(self.top) or self._compact(self.bottom)):
                self._slide()
                if max(self.gaps()) < run.page_bytes:
                    self.unplaced += 1
                    break
        low, high = self.gaps()
        return run.low - 1 if low > high else run.high

    def _make_way(self, below: bool) -> bool:
        # One page moves so that the stack on this side gets room: the float's nearest one, else the peer's topmost.
        run, peer = self.floating, self.top if below else self.bottom
        if run is None or not run.slot_of:
            return self._compact(peer)
        slot = run.hole()
        if slot is not None:
            self.moved_bytes += run.move_end(not below, slot)
            return True
        if self.gaps()[1 if below else 0] >= run.page_bytes:
            self.moved_bytes += run.move_end(not below, run.high if below else run.low - 1)
            return True
        if self._compact(peer):
            return True
        return self._slide(down=not below)

    def _compact(self, run: Run) -> bool:
        slot = run.hole()
        if slot is None:
            return False
        self.moved_bytes += run.move_end(True, slot)
        return True

    def _slide(self, down: bool = True) -> bool:
        # The whole float moves against one neighbour: its pages are longer than either gap.
        run = self.floating
        low, high = self.gaps()
        if run is None or not (low if down else high):
            return False
        self.origin += -low if down else high
        self.moved_bytes += len(run.slot_of) * run.page_bytes
        return True


def replay(history: History) -> Json:
    """Put a recorded history into stacks; return what they moved, and who would have waited had they not."""
    stacks = Stacks(history.page_bytes, history.arena_bytes)
    commits = late = 0
    owners: set[str] = set()
    delayed: set[str] = set()
    for kind, pool, handles, taken_by in history.events:
        if kind == "give":
            for handle in handles:
                stacks.runs[pool].give(handle)
            continue
        commits += 1
        owners.update(taken_by)
        if not stacks.take(pool, handles):
            late += 1
            delayed.update(taken_by)
    written = history.written_bytes
    assert stacks.unplaced == 0, f"{stacks.unplaced} pages find no bytes, which the slabs had"
    return {
        "written_gib": round(written / GIB, 1),
        "slabs_moved_percent": percent(history.moved_bytes, written),
        "stacks_moved_percent": percent(stacks.moved_bytes, written),
        "stacks_commits_without_room_percent": percent(late, commits),
        "stacks_requests_delayed_percent": percent(len(delayed), len(owners)),
    }


def percent(part: float, whole: float) -> float:
    """Return a share in per cent, with the digits that matter."""
    return float(f"{100 * part / max(1, whole):.3g}")
