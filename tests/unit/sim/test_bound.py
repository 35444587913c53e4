"""The FIFO bound: counted by hand, and against a simulation that goes request by request and step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import mean

import pytest

from halocline.memory.demand import span
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.memory.sizing import static_caps
from halocline.sim.bound import Bound, fifo_bound

PAGE_BYTES = 4 * 2 * 32 * 2  # four positions of one head, K and V of 32 elements each, in bf16


def arena(pages: int, *kinds: Retention) -> ArenaLayout:
    """One layer per kind, four positions and 512 bytes a page, so many pages in all."""
    layers = [
        LayerKV(number, kind, state_bytes=PAGE_BYTES) if isinstance(kind, State) else LayerKV(number, kind, 1, 32, 32)
        for number, kind in enumerate(kinds)
    ]
    return solve_layout(layers, pages * PAGE_BYTES, 4)


def test_requests_enter_by_what_they_hold_now_and_leave_after_their_output() -> None:
    # Prompts of 4, outputs of 4: they compute positions 3 ... 6, so 1 page in their first step, 2 in the next three.
    # Five pages, a queue of four. Step 1: all four enter with a page each. Step 2: all grow, 8 pages; the fourth and
    # the third are swapped out, 4 pages are left. Steps 3 and 4: the third wants 2 pages and finds 1. Step 5: the first
    # two have ended; the third and the fourth compute the three that they lack, in steps 5, 6 and 7.
    assert fifo_bound(arena(5, Full()), [(4, 4)] * 4) == Bound(
        0.0, 0.0, peak=4, steps=7, finished=4, rejected=0, swaps=2
    )


def test_means_are_taken_from_the_first_refusal_until_the_last_one_enters() -> None:
    # Each computes 3 and 4 (1 page, then 2). Three pages, five requests a b c d e:
    # 1: a b c, 3 pages. 2: a, b and c would be 6; a alone is 2, and b, who now needs 2, does not fit beside it.
    # 3: b, and c does not fit beside it. 4: c, and d enters in the page that is left. 5: d, and e enters; nobody new
    # waits from here on. 6: e.
    bound = fifo_bound(arena(3, Full()), [(4, 2)] * 5)
    assert (bound.steps, bound.finished, bound.swaps, bound.peak) == (6, 5, 2, 3)
    assert bound.concurrency == pytest.approx((3 + 1 + 1 + 2) / 4)
    assert bound.held_share == pytest.approx((3 + 2 + 2 + 3) / 4 / 3)


def test_a_window_that_slides_gives_its_pages_up() -> None:
    # Window 4: position 8 sees 5 ... 8, two pages; position 11 sees 8 ... 11, one. Four steps hold 2, 2, 2, 1 pages.
    layout = arena(2, Sliding(4))
    assert fifo_bound(layout, [(9, 4)]).steps == 4
    bound = fifo_bound(layout, [(9, 4)] * 2)
    # Beside the last step of the first, which holds 1, the 2 of the second do not fit; in three pages they do.
    assert (bound.steps, bound.peak) == (8, 1)
    assert fifo_bound(arena(3, Sliding(4)), [(9, 4)] * 2).steps == 7


def test_local_attention_starts_again() -> None:
    # Chunks of 8: position 7 sees two pages, position 8 one. Two pages: both run at once from position 8 on.
    bound = fifo_bound(arena(2, Chunked(8)), [(8, 5), (9, 4)])
    assert (bound.peak, bound.steps) == (2, 5)


def test_what_does_not_fit_an_empty_arena_is_left_out() -> None:
    bound = fifo_bound(arena(4, Full()), [(16, 1), (16, 2), (17, 1), (4, 1)])
    assert (bound.finished, bound.rejected) == (2, 2)


def test_under_caps_each_pool_is_limited_alone() -> None:
    layout = arena(6, Full(), Sliding(4))
    # Three pages each: two requests of two full pages do not fit, though four pages of six are free.
    caps = static_caps(layout, 1.0)
    assert caps == (3, 3)
    assert fifo_bound(layout, [(8, 2)] * 2, caps).peak == 1
    assert fifo_bound(layout, [(8, 2)] * 2).peak == 2


def by_hand(layout: ArenaLayout, lengths: list[tuple[int, int]], caps: tuple[int, ...] | None) -> Bound:
    """The same queue with lists, `span` and one step at a time."""

    def counts(requests: list[int]) -> list[int]:
        spans = [[span(pool, positions[request], positions[request] + 1) for request in requests] for pool in pools]
        return [sum(last - first for first, last in column) for column in spans]

    def taken(requests: list[int]) -> int:
        return sum(count * pool.page_bytes for count, pool in zip(counts(requests), pools, strict=True))

    def fits(requests: list[int]) -> bool:
        if caps is None:
            return taken(requests) <= layout.budget_bytes
        limits = [slabs * pool.pages_per_slab for slabs, pool in zip(caps, pools, strict=True)]
        return all(count <= limit for count, limit in zip(counts(requests), limits, strict=True))

    pools = layout.pools
    positions = {number: prompt - 1 for number, (prompt, _) in enumerate(lengths)}
    ends = {number: prompt + output - 1 for number, (prompt, output) in enumerate(lengths)}
    queue, running, swapped = list(positions), [], []
    steps = swaps = peak = 0
    full = False
    measured: list[tuple[int, float]] = []
    while queue or running or swapped:
        while running and not fits(running):
            swapped.append(running.pop())
            swaps += 1
        while (swapped or queue) and fits([*running, swapped[-1] if swapped else queue[0]]):
            running.append(swapped.pop() if swapped else queue.pop(0))
        full |= bool(swapped or queue)
        steps += 1
        peak = max(peak, len(running))
        if full and queue:
            measured.append((len(running), taken(running) / layout.budget_bytes))
        for request in running:
            positions[request] += 1
        running = [request for request in running if positions[request] < ends[request]]
    means = [mean(column) for column in zip(*measured, strict=True)] or [0.0, 0.0]
    return Bound(means[0], means[1], peak, steps, len(lengths), 0, swaps)


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_is_what_a_step_by_step_queue_gives(seed: int) -> None:
    random = Random(seed)
    kinds = random.sample([Full(), Sliding(random.randint(1, 9)), Chunked(random.randint(2, 11)), State()], 2)
    layout = arena(random.randint(24, 60), *kinds)
    lengths = [(random.randint(1, 20), random.randint(1, 12)) for _ in range(random.randint(1, 30))]
    split = seed % 3 == 0 and all(pool.is_positional for pool in layout.pools)
    caps = static_caps(layout, 0.8) if split else None
    bound, expected = fifo_bound(layout, lengths, caps), by_hand(layout, lengths, caps)
    assert bound == replace(
        expected, concurrency=pytest.approx(expected.concurrency), held_share=pytest.approx(expected.held_share)
    )


def test_the_random_queues_are_of_all_sorts() -> None:
    """Or the comparison above would compare nothing: some swap, some stay saturated, some have local chunks."""
    swaps = saturated = 0
    for seed in range(30):
        random = Random(seed)
        layout = arena(random.randint(24, 40), Full(), Sliding(random.randint(1, 9)))
        bound = fifo_bound(layout, [(random.randint(1, 20), random.randint(1, 12)) for _ in range(30)])
        swaps, saturated = swaps + bound.swaps, saturated + (bound.concurrency > 0)
    assert swaps > 30
    assert saturated == 30
