"""B1 to B6: what layouts cost, for hybrid models, states and draft models.

Each check takes the formula under test as an argument; the wrong one that people met must make the same check fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.memory.sizing import Limits, concurrency, start_problems, uniform_concurrency
from halocline.units import GIB, MIB, ceil_div, ceil_to
from testing.layouts import layers_of, model_layout, small_layout

Solve = Callable[[tuple[LayerKV, ...], int], ArenaLayout]


def draft(count: int, retention: Retention, heads: int = 8, k_dim: int = 128, v_dim: int = 128) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(index, retention, heads, k_dim, v_dim, model="draft") for index in range(count))


def alike(full: int, sliding: int, window_tokens: int = 1024) -> tuple[LayerKV, ...]:
    return layers_of((full, Full()), (sliding, Sliding(window_tokens)), heads=8, dim=128)


def unlike(*kinds: tuple[int, Retention, int, int, int, int]) -> tuple[LayerKV, ...]:
    """Return layers of (count, retention, heads, K width, V width, element bytes)."""
    layers: list[LayerKV] = []
    for count, retention, heads, k_dim, v_dim, dtype_bytes in kinds:
        layers += [LayerKV(len(layers) + n, retention, heads, k_dim, v_dim, dtype_bytes) for n in range(count)]
    return tuple(layers)


# --- B1: layer lists that do not divide into equal groups

LISTS = {
    "19+18": alike(19, 18),
    "20+30": alike(20, 30),
    "10+16": alike(10, 16),
    "10+52": alike(10, 52),
    "9+39 with 5 full draft layers": alike(9, 39, 128) + draft(5, Full()),
    "9+39 with 5 sliding draft layers": alike(9, 39, 128) + draft(5, Sliding(128)),
    "9+39 with 5 draft layers of their own window": alike(9, 39, 128) + draft(5, Sliding(2048)),
    "unequal heads": unlike((10, Full(), 16, 128, 128, 2), (52, Sliding(1024), 7, 128, 128, 2)),
    "unequal head sizes": unlike((10, Full(), 4, 192, 192, 2), (50, Sliding(1024), 4, 80, 80, 2)),
    "unequal K and V widths": unlike((10, Full(), 1, 512, 64, 2), (50, Sliding(1024), 4, 192, 128, 2)),
    "unequal dtypes": unlike((10, Full(), 8, 128, 128, 4), (52, Sliding(1024), 8, 128, 128, 2)),
    "all unequal with draft": unlike((10, Full(), 16, 128, 128, 4), (52, Sliding(1024), 7, 80, 96, 2))
    + draft(5, Sliding(2048), 3, 72, 72),
    "all unequal with local chunks": unlike(
        (11, Full(), 5, 100, 60, 2), (37, Sliding(1024), 3, 72, 52, 2), (7, Chunked(8192), 2, 96, 96, 1)
    ),
}
SIZES = (256 * MIB, GIB, 4 * GIB, 16 * GIB, 40 * GIB, 80 * GIB, 640 * GIB)


def equal_pages(layers: tuple[LayerKV, ...], budget_bytes: int) -> ArenaLayout:
    """Give every pool the same page bytes, those of the longest: what engines with one block size do."""
    layout = solve_layout(layers, budget_bytes, 16)
    stride = max(ceil_to(pool.page_bytes, 64) for pool in layout.pools)
    pools = tuple(replace(pool, pages_per_slab=1, stride_bytes=stride) for pool in layout.pools)
    return ArenaLayout(pools, stride, budget_bytes // stride, budget_bytes)


def check_b1(solve: Solve, layers: tuple[LayerKV, ...], budget_bytes: int) -> None:
    layout = solve(layers, budget_bytes)
    placed = [place.spec for pool in layout.pools for place in pool.layers]
    assert sorted(placed, key=layers.index) == list(layers)  # no padding layer, none left out
    assert max(pool.padding_bytes / pool.stride_bytes for pool in layout.pools) <= 0.01
    partly_used = len(layout.pools) * layout.slab_bytes / layout.budget_bytes
    if budget_bytes >= 80 * GIB:
        assert partly_used <= 0.01
    elif budget_bytes >= 16 * GIB:
        assert partly_used <= 0.03


@pytest.mark.parametrize("budget_bytes", SIZES, ids=lambda size: f"{size // MIB}MiB")
@pytest.mark.parametrize("name", LISTS)
def test_b1_no_layer_list_pads_more_than_a_percent_at_any_arena_size(name: str, budget_bytes: int) -> None:
    check_b1(solve_layout, LISTS[name], budget_bytes)


@pytest.mark.parametrize("budget_bytes", [16 * MIB, 64 * MIB], ids=lambda size: f"{size // MIB}MiB")
@pytest.mark.parametrize("name", list(LISTS)[:7])
def test_b1_layers_of_one_size_pad_no_more_in_the_smallest_arenas(name: str, budget_bytes: int) -> None:
    check_b1(solve_layout, LISTS[name], budget_bytes)


@pytest.mark.parametrize("name", LISTS)
def test_b1_equal_page_bytes_for_all_kinds_fail_this_check(name: str) -> None:
    with pytest.raises(AssertionError):
        check_b1(equal_pages, LISTS[name], 80 * GIB)


# --- B2, B3: recurrent states


def qwen() -> ArenaLayout:
    return model_layout("qwen3-next-80b", 16 * GIB)


def state_in_token_pages(layout: ArenaLayout) -> ArenaLayout:
    """Let each page of full attention be as long as a state: a short prompt takes one whole."""
    pools = tuple(replace(pool, pages_per_slab=1, stride_bytes=layout.slab_bytes) for pool in layout.pools)
    return replace(layout, pools=pools)


def check_b2(layout: ArenaLayout) -> None:
    """64 prompts of 12 tokens: the bytes of each are one state and one page, within a percent."""
    one = resident(layout, 12, 4)
    cost = sum(pages * pool.stride_bytes for pages, pool in zip(one, layout.pools, strict=True))
    exact = sum(pool.page_bytes for pool in layout.pools)
    assert exact <= cost <= 1.01 * exact
    together = Demand(64 * pages for pages in one)
    assert Budget(layout).fits_empty(together)
    # What the 64 take in slabs is that, and at most the one partly used slab of the full pool.
    assert Budget(layout).slabs_needed(together) <= 64 + 1


def test_b2_a_short_prompt_costs_one_state_and_one_page() -> None:
    check_b2(qwen())


def test_b2_pages_as_long_as_a_state_fail_this_check() -> None:
    with pytest.raises(AssertionError):
        check_b2(state_in_token_pages(qwen()))


def state_growing_with_tokens(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> Demand:
    """Price a state per 512 tokens, as if it were a page of positions."""
    pages = resident(layout, prompt_tokens, new_tokens)
    return Demand(
        count if pool.is_positional else ceil_div(prompt_tokens + new_tokens - 1, 512)
        for count, pool in zip(pages, layout.pools, strict=True)
    )


def check_b3(price: Callable[[ArenaLayout, int, int], Demand]) -> None:
    for prompt, new in ((1, 1), (1301, 1), (1301, 4000), (100_000, 512)):
        assert price(qwen(), prompt, new)[1] == 1


def test_b3_a_request_has_one_state_however_many_tokens() -> None:
    check_b3(resident)


def test_b3_a_state_priced_by_tokens_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_b3(state_growing_with_tokens)


# --- B4: draft and target

TARGET = alike(9, 39, 128)
DRAFT = draft(5, Full(), 2, 64) + tuple(
    replace(layer, layer=layer.layer + 5) for layer in draft(3, Sliding(2048), 2, 64)
)


def planned_together(budget_bytes: int) -> list[ArenaLayout]:
    return [solve_layout(TARGET + DRAFT, budget_bytes)]


def planned_apart(budget_bytes: int) -> list[ArenaLayout]:
    """Size the target as if it were alone, then give the draft as many slabs of its own."""
    target, alone = solve_layout(TARGET, budget_bytes), solve_layout(DRAFT, budget_bytes // 8)
    return [target, alone]


def check_b4(plan: Callable[[int], list[ArenaLayout]], budget_bytes: int) -> None:
    layouts = plan(budget_bytes)
    assert sum(layout.arena_bytes for layout in layouts) <= budget_bytes
    assert sum(layout.arena_bytes + layout.remainder_bytes for layout in layouts) == budget_bytes
    for layout in layouts:
        assert sum(len(pool.layers) for pool in layout.pools) == len(TARGET + DRAFT)
        for pool in layout.pools:
            _check_last_page(layout, pool)


def _check_last_page(layout: ArenaLayout, pool: PoolLayout) -> None:
    """Target and draft layers of a pool share its page numbers: the last page of each ends inside the arena."""
    last_page = layout.slabs * pool.pages_per_slab - 1
    for place in pool.layers:
        position_bytes = place.spec.kv_heads * place.spec.dtype_bytes * pool.page_tokens
        end = last_page * pool.stride_bytes + place.v_offset + position_bytes * place.spec.v_dim
        assert end <= layout.arena_bytes


@pytest.mark.parametrize("budget_bytes", [256 * MIB, GIB + 12_345, 16 * GIB])
def test_b4_target_and_draft_together_never_exceed_the_budget_by_a_byte(budget_bytes: int) -> None:
    check_b4(planned_together, budget_bytes)


def test_b4_planning_them_apart_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_b4(planned_apart, GIB)


# --- B5: an all-sliding draft beside a full target


def b5_layout() -> ArenaLayout:
    """Return a target of 59.6 KiB and a draft of 20 KiB per token, the draft with a window of 2,048."""
    target = unlike((10, Full(), 1, 1526, 1526, 2))
    return solve_layout(target + draft(5, Sliding(2048), 8, 128, 128), 640 * GIB, 16)


def one_slot_per_token(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> int:
    """Give the draft a slot for every token of the target."""
    return uniform_concurrency(layout, prompt_tokens, new_tokens)


def by_window(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> int:
    return concurrency(layout, None, prompt_tokens, new_tokens)


def check_b5(sessions: Callable[[ArenaLayout, int, int], int]) -> None:
    layout = b5_layout()
    target, own = layout.pools
    assert round(target.page_bytes / 16 / 1024, 1) == 59.6
    assert own.page_bytes / 16 == 20 * 1024
    ratio = sessions(layout, 32_000, 768) / uniform_concurrency(layout, 32_000, 768)
    assert ratio == pytest.approx(1.31, abs=0.01)


def test_b5_a_sliding_draft_priced_by_its_window_allows_1_31_times_the_target_tokens() -> None:
    check_b5(by_window)


def test_b5_one_draft_slot_per_token_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_b5(one_slot_per_token)


# --- B6: windows as rings for all request slots


def b6_layout() -> ArenaLayout:
    """Return an arena with room for 32 requests of 128 tokens, far below 256 whole windows of 4,096."""
    layout = small_layout(Full(), Sliding(4096), page_tokens=16)
    slabs = 32 * 8 + 32 * 8 + 1
    return replace(layout, slabs=slabs, budget_bytes=slabs * layout.slab_bytes)


LIMITS = Limits(step_tokens=512, max_running_requests=256, model_tokens=131_072, max_model_len=128)


def rings(layout: ArenaLayout, limits: Limits) -> list[str]:
    """Reserve W tokens for every request slot at start."""
    reserved = Demand((1, limits.max_running_requests * (4096 // 16)))
    return [] if Budget(layout).fits_empty(reserved) else ["the rings do not fit"]


def on_demand(layout: ArenaLayout, limits: Limits) -> list[str]:
    return start_problems(layout, None, limits)


def check_b6(problems: Callable[[ArenaLayout, Limits], list[str]]) -> None:
    layout = b6_layout()
    assert problems(layout, LIMITS) == []
    assert concurrency(layout, None, 100, 28) == 32


def test_b6_windows_are_taken_on_demand_whatever_the_request_slots() -> None:
    check_b6(on_demand)
    assert resident(b6_layout(), 100, 28)[1] == 8
    assert floor_demand(b6_layout())[1] == 1


def test_b6_a_ring_of_a_window_per_slot_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_b6(rings)


def test_a_state_pool_takes_part_in_the_layout_like_any_other() -> None:
    layout = qwen()
    assert isinstance(layout.pools[1].retention, State)
    assert concurrency(layout, None, 12, 4) == 219
