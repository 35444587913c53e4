"""Plans: what a backend is told, in which order, and that it belongs to the plan alone."""

from __future__ import annotations

import numpy as np

from halocline.memory.demand import span
from halocline.step import StepPlan
from testing.schedule import FOUR_POOLS, World, greedy, rules, tiny_layout


def mixed_world() -> tuple[World, StepPlan]:
    """Return a world with two decodes and a chunk in one plan."""
    world = World(tiny_layout(FOUR_POOLS, 60), rules(step_tokens=24))
    world.arrive("a", 5, greedy(30))
    world.arrive("b", 7, greedy(30))
    for _ in range(9):
        world.step()
    world.arrive("c", 30, greedy(30))
    plan = world.plan()
    assert plan is not None
    return world, plan


def test_decodes_come_first_and_rows_are_packed_without_padding() -> None:
    world, plan = mixed_world()
    assert [segment.request_id for segment in plan.segments] == ["a", "b", "c"]
    assert plan.query_starts.tolist() == [0, 1, 2, 22]
    assert [segment.samples for segment in plan.segments] == [True, True, False]
    assert plan.positions.tolist() == [plan.segments[0].start, plan.segments[1].start, *range(20)]
    assert plan.token_ids[:2].tolist() == [world.outputs["a"][-1], world.outputs["b"][-1]]
    assert tuple(plan.token_ids[2:].tolist()) == world.arrivals["c"].prompt[:20]


def test_tables_cover_exactly_what_a_segment_reads_and_writes() -> None:
    world, plan = mixed_world()
    for pool, table in zip(world.layout.pools, plan.tables, strict=True):
        for index, segment in enumerate(plan.segments):
            first, last = span(pool, segment.start, segment.start + segment.tokens)
            count = table.page_starts[index + 1] - table.page_starts[index]
            assert (table.first_page[index], count) == (first, last - first), f"{pool.name}, {segment.request_id}"
        assert table.page_starts[-1] == len(table.pages)


def test_the_arrays_have_the_documented_types() -> None:
    _, plan = mixed_world()
    assert (plan.token_ids.dtype, plan.positions.dtype, plan.query_starts.dtype) == (np.int64, np.int64, np.int32)
    for table in plan.tables:
        assert {table.pages.dtype, table.page_starts.dtype, table.first_page.dtype} == {np.dtype(np.int32)}


def test_a_plan_is_not_changed_by_later_steps() -> None:
    world, plan = mixed_world()
    arrays = [plan.token_ids, plan.positions, plan.query_starts]
    arrays += [array for table in plan.tables for array in (table.pages, table.page_starts, table.first_page)]
    before = [array.copy() for array in arrays]
    world.apply(world.backend.run(plan))
    world.run()
    assert all(np.array_equal(old, new) for old, new in zip(before, arrays, strict=True))


def test_a_segment_says_what_its_sampler_must_know() -> None:
    world = World(tiny_layout(FOUR_POOLS, 60), rules())
    params = greedy(9, min_tokens=2)
    world.arrive("a", 5, params)
    for expected in (True, True, False):
        plan = world.plan()
        assert plan is not None
        segment = plan.segments[0]
        assert (segment.params, segment.prompt_tokens, segment.forbids_stop) == (params, 5, expected)
        assert list(segment.history) == [*world.arrivals["a"].prompt, *world.outputs["a"]]
        world.apply(world.backend.run(plan))
