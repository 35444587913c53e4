"""The stacks of `benchmarks/two_stacks.py`: were they wrong, the comparison with slabs would say nothing."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from random import Random
from types import ModuleType

import pytest

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding
from testing.policies import SHARED, KeepingArena, Policy, by_slabs
from testing.saturated import made_up_lengths, saturate
from testing.source import PROJECT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_stacks", PROJECT / "benchmarks" / "two_stacks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rival = load()


def places(stacks) -> list[tuple[int, int]]:
    """Return the bytes of every page, from the stacks' own books."""
    found = []
    for run in stacks.runs:
        for slot in run.slot_of.values():
            if run is stacks.bottom:
                start = slot * run.page_bytes
            elif run is stacks.top:
                start = stacks.arena_bytes - (slot + 1) * run.page_bytes
            else:
                start = stacks.origin + slot * run.page_bytes
            found.append((start, start + run.page_bytes))
    return sorted(found)


@pytest.mark.parametrize("page_bytes", [[3, 5], [7, 2], [3, 4, 5], [2, 7, 3], [1, 1, 1]])
@pytest.mark.parametrize("seed", range(4))
def test_pages_never_overlap_and_every_free_byte_is_found(page_bytes: list[int], seed: int) -> None:
    """Random comings and goings in a small arena: a page that fits by bytes is placed, by moves if need be."""
    random, arena_bytes = Random(seed), 120
    stacks = rival.Stacks(page_bytes, arena_bytes)
    live: list[tuple[int, int]] = []
    # A float's pages cannot be cut to a gap: as many bytes as its page may stay unused on either side.
    spare = 2 * max(page_bytes) if len(page_bytes) == 3 else 0
    for handle in range(400):
        pool = random.randrange(len(page_bytes))
        used = sum(page_bytes[of] for of, _ in live)
        if used + page_bytes[pool] + spare <= arena_bytes and random.random() < 0.6:
            stacks.take(pool, [handle])
            live.append((pool, handle))
        elif live:
            of, gone = live.pop(random.randrange(len(live)))
            stacks.runs[of].give(gone)
        found = places(stacks)
        assert len(found) == len(live)
        assert all(start >= 0 and end <= arena_bytes for start, end in found), found
        assert all(end <= start for (_, end), (start, _) in pairwise(found)), found
    assert stacks.unplaced == 0


def test_holes_are_used_before_anything_moves() -> None:
    stacks = rival.Stacks([10, 10], 100)
    assert stacks.take(0, [1, 2, 3])
    stacks.runs[0].give(2)
    assert stacks.take(1, [4, 5, 6, 7, 8, 9, 10])
    assert stacks.take(0, [11])
    assert stacks.moved_bytes == 0


def test_a_hole_of_the_peer_costs_one_move() -> None:
    """Ten pages: three below, seven above. One below goes; the eighth above needs the topmost one below moved."""
    stacks = rival.Stacks([10, 10], 100)
    stacks.take(0, [1, 2, 3])
    stacks.take(1, [4, 5, 6, 7, 8, 9, 10])
    stacks.runs[0].give(1)
    assert not stacks.take(1, [11])
    assert stacks.moved_bytes == 10


@pytest.mark.parametrize("base", [SHARED.arena, KeepingArena])
def test_a_recorded_history_is_whole(base: type) -> None:
    """What was taken is given back once, or is still held when the queue is done: by nobody, unless pages are kept."""
    layers = [LayerKV(number, kind, 16, 128, 128) for number, kind in enumerate([Full()] * 2 + [Sliding(64)] * 4)]
    books: list = []
    policy = Policy("recorded", by_slabs, arena=rival.recording(base, books))
    outcome = saturate(policy, layers, 1 << 28, made_up_lengths("azure", 30))
    assert outcome.finished == 30
    taken, given = (
        [(pool, h) for kind, pool, hs, _ in books[0].events if kind == name for h in hs] for name in ("take", "give")
    )
    assert len(set(taken)) == len(taken)
    assert len(set(given)) == len(given)
    assert set(given) <= set(taken)
    assert (set(given) == set(taken)) == (base is not KeepingArena)
    assert rival.replay(books[0])["written_gib"] > 0
