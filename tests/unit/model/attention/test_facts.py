"""The facts of a step are what the plan says, and a plan whose tables are too short is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from halocline.errors import InvariantError
from halocline.memory.layout import ArenaLayout, LayerKV
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.model.attention import AttentionStep
from halocline.model.attention.facts import layer_views, lower_bounds
from halocline.step import PoolTables, StepPlan
from testing.conformance import HandScheduler, make_arena, make_layout

LAYERS = [LayerKV(0, Full(), 2, 4, 6, 4), LayerKV(1, Sliding(5), 1, 8, 8, 4), LayerKV(2, Full(), 2, 4, 6, 4)]


@pytest.fixture
def layout() -> ArenaLayout:
    return make_layout(LAYERS, {"full": 4, "sliding-5": 2}, slabs=40)


@pytest.fixture
def plan(layout: ArenaLayout) -> StepPlan:
    return HandScheduler(layout).plan(7, [("a", range(12), 11, 1), ("b", range(9), 3, 6)])


def test_each_token_is_written_where_its_table_says(plan: StepPlan, layout: ArenaLayout) -> None:
    step = AttentionStep.of(plan, layout)
    assert step.rows == (0, 1, 7)
    assert step.first_positions == (11, 3)
    for pool, facts, tables in zip(layout.pools, step.pools, plan.tables, strict=True):
        assert facts is not None
        for row, position in enumerate(plan.positions.tolist()):
            segment = 0 if row == 0 else 1
            at = tables.page_starts[segment] + position // pool.page_tokens - tables.first_page[segment]
            assert int(facts.write_pages[row]) == tables.pages[at]
            assert int(facts.write_slots[row]) == position % pool.page_tokens


def test_no_two_tokens_are_written_to_one_place(plan: StepPlan, layout: ArenaLayout) -> None:
    for facts in AttentionStep.of(plan, layout).pools:
        assert facts is not None
        places = set(zip(facts.write_pages.tolist(), facts.write_slots.tolist(), strict=True))
        assert len(places) == 7


def test_a_table_that_begins_after_the_window_is_refused(plan: StepPlan, layout: ArenaLayout) -> None:
    late = replace(plan.tables[1], first_page=plan.tables[1].first_page + 1)
    with pytest.raises(
        InvariantError, match="sliding-5: segment 0 computes positions 11 to 11 but its pages hold 8 to"
    ):
        AttentionStep.of(replace(plan, tables=(plan.tables[0], late)), layout)


def test_a_table_that_ends_before_the_chunk_is_refused(plan: StepPlan, layout: ArenaLayout) -> None:
    full = plan.tables[0]
    short = PoolTables(
        full.pages[:-1], full.page_starts - np.array([0, 0, 1], np.int32), full.first_page, full.write_from
    )
    with pytest.raises(InvariantError, match="full: segment 1 computes positions 3 to 8 but its pages hold 0 to 7"):
        AttentionStep.of(replace(plan, tables=(short, plan.tables[1])), layout)


def test_facts_are_copies_of_the_plan(plan: StepPlan, layout: ArenaLayout) -> None:
    step = AttentionStep.of(plan, layout)
    facts = step.pools[0]
    assert facts is not None
    before = facts.pages.clone()
    plan.tables[0].pages[:] = -1
    assert torch.equal(facts.pages, before)


@pytest.mark.parametrize("retention", [Full(), Sliding(1), Sliding(5), Chunked(1), Chunked(7)])
def test_lower_bounds_are_first_needed_in_bulk(retention: Full | Sliding | Chunked) -> None:
    positions = np.arange(40)
    assert lower_bounds(retention, positions).tolist() == [retention.first_needed(p) for p in range(40)]


def test_views_of_all_layers_cover_every_byte_at_most_once(layout: ArenaLayout) -> None:
    arena = torch.zeros(layout.arena_bytes, dtype=torch.uint8)
    views = layer_views(arena, layout, torch.float32)
    assert sorted(views) == [0, 1, 2]
    for view in views.values():
        # One page per slab here, so page p is slab p: give each layer half of the slabs of its own pool.
        pages = slice(0, 20) if view.pool == 0 else slice(20, 40)
        for part in (view.k, view.v):
            assert not part[pages].any(), "two layers share bytes"
            part[pages] = 1.0
    used = sum(pool.page_bytes * 20 for pool in layout.pools)
    assert int(arena.view(torch.float32).sum()) * 4 == used


def test_views_reject_a_dtype_other_than_the_layouts(layout: ArenaLayout) -> None:
    with pytest.raises(AssertionError, match="laid out with 4-byte elements"):
        layer_views(make_arena(layout), layout, torch.float64)


def test_layers_of_another_model_and_states_have_no_views() -> None:
    layers = [
        LayerKV(0, Full(), 1, 4, 4, 4),
        LayerKV(0, Full(), 1, 4, 4, 4, model="draft"),
        LayerKV(1, State(), state_bytes=64),
    ]
    layout = make_layout(layers, {"full": 4, "state": 1}, slabs=4)
    assert list(layer_views(make_arena(layout), layout, torch.float32)) == [0]


def test_what_lies_below_write_from_is_not_written(plan: StepPlan, layout: ArenaLayout) -> None:
    full = replace(plan.tables[0], write_from=np.array([12, 5], np.int32))
    all_of_full, all_of_window = AttentionStep.of(plan, layout).pools
    facts, window = AttentionStep.of(replace(plan, tables=(full, plan.tables[1])), layout).pools
    assert facts is not None
    assert window is not None
    assert all_of_full is not None
    assert all_of_window is not None
    assert all_of_full.write_rows is None
    # Row 0 is position 11 of a; rows 1 to 6 are positions 3 to 8 of b.
    assert facts.write_rows is not None
    assert facts.write_rows.tolist() == [3, 4, 5, 6]
    assert facts.write_pages.tolist() == all_of_full.write_pages[3:].tolist()
    assert facts.write_slots.tolist() == all_of_full.write_slots[3:].tolist()
    assert window.write_rows is None, "each pool has its own map"
    assert window.write_pages.tolist() == all_of_window.write_pages.tolist()
