"""Pages of one length cut into pages of another: against a reference that goes position by position."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.landings import Landings
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding
from halocline.schedule.events import PoolPages

KEY = Key("peer", "r", 1)
MOST_TOKENS = 96


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerKV, ...]:
    """Draw layers of up to three retentions; heads, widths of K and V, and elements differ between them."""
    window, area = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    kinds: list[Retention] = draw(
        st.lists(st.sampled_from([Full(), Sliding(window), Chunked(area)]), min_size=1, max_size=4)
    )
    sizes = st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(0, 5), st.sampled_from([1, 2, 4, 8]))
    return tuple(LayerKV(i, kind, *draw(sizes)) for i, kind in enumerate(kinds))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ArenaLayout, ArenaLayout, int, int]:
    """Draw (layout of the sender, of the receiver, start, fill)."""
    made = draw(layers())
    lengths = st.sampled_from([1, 2, 4, 8, 16, 32])
    layouts = []
    for _ in range(2):
        names = {pool.name for pool in solve_layout(made, 1 << 30, 1).pools}
        tokens = {name: draw(lengths) for name in sorted(names)}
        slab = solve_layout(made, 1 << 30, tokens).slab_bytes
        layouts.append(solve_layout(made, slab * 512, tokens))
    theirs, ours = layouts
    granule = max(theirs.granule_tokens, ours.granule_tokens)
    fill = draw(st.integers(1, MOST_TOKENS))
    start = draw(st.integers(0, (fill - 1) // granule)) * granule
    return theirs, ours, start, fill


def first_token(pool: PoolLayout, start: int, fill: int, page_tokens: int) -> int:
    """Position with which the first page begins that is needed: of `start` in a full pool, else of what is read."""
    needed = max(start, pool.retention.first_needed(fill))
    return needed // page_tokens * page_tokens


def tables(layout: ArenaLayout, start: int, fill: int, draw: np.random.Generator) -> tuple[PoolPages, ...]:
    """Return pages in any order for what is needed of each pool; no slab is of two pools."""
    made = []
    slabs = np.array_split(draw.permutation(layout.slabs), len(layout.pools))
    for pool, own in zip(layout.pools, slabs, strict=True):
        first = first_token(pool, start, fill, pool.page_tokens) // pool.page_tokens
        count = max(0, -(-fill // pool.page_tokens) - first)
        every = own[:, None] * pool.pages_per_slab + np.arange(pool.pages_per_slab)
        places = draw.permutation(every.reshape(-1))[:count]
        assert len(places) == count, f"{len(places)} pages cannot be {count}"
        made.append(PoolPages(first, places.astype(np.int32)))
    return tuple(made)


def position_bytes(arena: np.ndarray, pool: PoolLayout, table: PoolPages, layer: int, position: int) -> bytes:
    """Return K and V of one layer (by its index in the model) at one position: the reference."""
    place = next(each for each in pool.layers if each.spec.layer == layer)
    spec = place.spec
    page = int(table.pages[position // pool.page_tokens - table.first_page]) * pool.stride_bytes
    slot = position % pool.page_tokens
    parts = []
    for offset, dim in ((place.k_offset, spec.k_dim), (place.v_offset, spec.v_dim)):
        size = spec.kv_heads * dim * spec.dtype_bytes
        parts.append(arena[page + offset + slot * size : page + offset + (slot + 1) * size].tobytes())
    return b"".join(parts)


@settings(max_examples=120, deadline=None)
@given(world=worlds(), seed=st.integers(0, 2**32))
def test_every_position_that_is_needed_arrives_and_no_byte_outside_its_page_changes(
    world: tuple[ArenaLayout, ArenaLayout, int, int], seed: int
) -> None:
    theirs, ours, start, fill = world
    draw = np.random.default_rng(seed)
    source, target = (draw.integers(0, 256, each.arena_bytes, np.uint8) for each in (theirs, ours))
    before = target.copy()
    their_pages, our_pages = (
        ArenaPages(arena, wire.facts_of(layout, model="m", dtype="d", vocab_size=9).pools)
        for arena, layout in ((source, theirs), (target, ours))
    )
    their_tables, our_tables = (tables(layout, start, fill, draw) for layout in (theirs, ours))
    landings = Landings(our_pages, ours.pools)
    landings.open(KEY, start, fill, our_tables)
    landing = landings.find(KEY)
    assert landing is not None
    order = [(pool, place) for pool, table in enumerate(their_tables) for place in range(len(table.pages))]
    for pool, place in draw.permutation(order) if order else []:
        table = their_tables[pool]
        page = their_pages.page(int(pool), int(table.pages[place]))
        landings.write(landing, int(pool), their_pages.pools[pool], int(table.first_page + place), page)
    assert landings.missing(KEY) == 0
    allowed = np.zeros(len(target), np.bool_)
    for pool, (mine, its) in enumerate(zip(ours.pools, theirs.pools, strict=True)):
        for number in our_tables[pool].pages:
            allowed[number * mine.stride_bytes : number * mine.stride_bytes + mine.page_bytes] = True
        for position in range(max(start, mine.retention.first_needed(fill)), fill):
            for place in mine.layers:
                here = position_bytes(target, mine, our_tables[pool], place.spec.layer, position)
                there = position_bytes(source, its, their_tables[pool], place.spec.layer, position)
                assert here == there, f"pool {mine.name}, position {position}, layer {place.spec.layer}"
    assert np.array_equal(target[~allowed], before[~allowed])


def test_a_cut_page_does_not_touch_positions_before_its_landing() -> None:
    """Pages of 16 into pages of 4 from position 12 on: positions 0 to 11 have no page there, and are skipped."""
    made = (LayerKV(0, Full(), 1, 1, 0, 1),)
    theirs, ours = (solve_layout(made, 64 * 64, tokens) for tokens in (16, 4))
    source, target = (
        np.arange(theirs.arena_bytes, dtype=np.uint32).astype(np.uint8),
        np.zeros(ours.arena_bytes, np.uint8),
    )
    facts = [wire.facts_of(each, model="m", dtype="d", vocab_size=9).pools for each in (theirs, ours)]
    landings = Landings(ArenaPages(target, facts[1]), ours.pools)
    landings.open(KEY, 12, 16, (PoolPages(3, np.array([5], np.int32)),))
    landing = landings.find(KEY)
    assert landing is not None
    landings.write(landing, 0, facts[0][0], 0, source[:16])
    expected = np.zeros_like(target)
    expected[5 * ours.pools[0].stride_bytes :][:4] = [12, 13, 14, 15]
    assert np.array_equal(target, expected)
