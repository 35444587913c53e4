"""The layout: pools from layers, pages inside slabs, and what is refused."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from halocline.errors import ConfigError
from halocline.memory.layout import ArenaLayout, LayerKV, place_layers, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.units import GIB, KIB, MIB, ceil_to
from testing.layouts import MODEL_LAYERS, QWEN3_NEXT_80B, layers_of, model_layout


def random_layers(seed: int) -> tuple[LayerKV, ...]:
    """Return layers of unequal heads, sizes, K and V widths, element sizes, kinds and models."""
    pick = random.Random(seed)
    kinds: list[Retention] = [
        Full(),
        Sliding(pick.randint(1, 300)),
        Sliding(512),
        Chunked(pick.randint(1, 300)),
        State(),
    ]
    layers = []
    for index in range(pick.randint(1, 12)):
        retention = pick.choice(kinds)
        dtype_bytes = pick.choice((1, 2, 4, 8))
        model = pick.choice(("target", "draft"))
        if isinstance(retention, State):
            layers.append(
                LayerKV(index, retention, dtype_bytes=dtype_bytes, state_bytes=pick.randint(1, 5000), model=model)
            )
            continue
        heads, k_dim, v_dim = pick.randint(1, 5), pick.randint(1, 96), pick.randint(0, 96)
        layers.append(LayerKV(index, retention, heads, k_dim, v_dim, dtype_bytes, model=model))
    return tuple(layers)


def check_geometry(layout: ArenaLayout, layers: tuple[LayerKV, ...]) -> None:
    """Recount every byte of a page: each layer's K and V once, aligned, without overlap, inside the stride."""
    assert sorted(place.spec.layer for pool in layout.pools for place in pool.layers) == [
        layer.layer for layer in layers
    ]
    assert layout.slabs * layout.slab_bytes + layout.remainder_bytes == layout.budget_bytes
    assert 0 <= layout.remainder_bytes < layout.slab_bytes
    for pool in layout.pools:
        assert pool.stride_bytes * pool.pages_per_slab == layout.slab_bytes
        assert pool.stride_bytes % 64 == 0
        runs = []
        for place in pool.layers:
            spec = place.spec
            assert spec.retention == pool.retention
            assert pool.stride_bytes % spec.dtype_bytes == place.k_offset % spec.dtype_bytes == 0
            assert place.v_offset % spec.dtype_bytes == 0 or isinstance(spec.retention, State)
            position_bytes = spec.kv_heads * spec.dtype_bytes * pool.page_tokens
            runs.append((place.k_offset, place.k_offset + position_bytes * spec.k_dim + spec.state_bytes))
            runs.append((place.v_offset, place.v_offset + position_bytes * spec.v_dim))
        runs.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(runs))
        assert runs[-1][1] <= pool.page_bytes <= pool.stride_bytes


@pytest.mark.parametrize(
    ("page_tokens", "seed"), [(None, seed) for seed in range(15)] + [(4 ** (seed % 4), seed) for seed in range(80)]
)
def test_every_layers_bytes_lie_aligned_and_apart_in_the_page(page_tokens: int | None, seed: int) -> None:
    layers = random_layers(seed)
    check_geometry(solve_layout(layers, 32 * MIB, page_tokens), layers)


@pytest.mark.parametrize("name", MODEL_LAYERS)
def test_the_pages_of_real_shapes_start_every_run_at_a_cache_line(name: str) -> None:
    for pool in model_layout(name).pools:
        assert all(place.k_offset % 64 == 0 for place in pool.layers)
        assert all(place.v_offset % 64 == 0 for place in pool.layers if pool.is_positional)


def test_within_a_page_runs_of_whole_cache_lines_come_before_odd_ones() -> None:
    odd = LayerKV(0, Full(), kv_heads=1, k_dim=3, v_dim=5, dtype_bytes=2)
    even = LayerKV(1, Full(), kv_heads=2, k_dim=32, v_dim=64, dtype_bytes=4)
    places, page_bytes = place_layers([odd, even], page_tokens=1)
    assert [(place.spec.layer, place.k_offset, place.v_offset) for place in places] == [(1, 0, 256), (0, 768, 774)]
    assert page_bytes == 768 + 6 + 10


def test_runs_of_whole_cache_lines_come_first_even_when_their_elements_are_narrower() -> None:
    odd = LayerKV(0, Full(), kv_heads=1, k_dim=3, v_dim=5, dtype_bytes=8)
    even = LayerKV(1, Full(), kv_heads=2, k_dim=32, v_dim=64, dtype_bytes=2)
    places, _ = place_layers([odd, even], page_tokens=1)
    assert [(place.spec.layer, place.k_offset) for place in places] == [(1, 0), (0, 384)]


def test_among_odd_runs_wider_elements_come_first_so_that_nothing_lies_between() -> None:
    narrow = LayerKV(0, Full(), kv_heads=1, k_dim=3, v_dim=2, dtype_bytes=2)
    wide = LayerKV(1, Full(), kv_heads=1, k_dim=3, v_dim=2, dtype_bytes=8)
    places, page_bytes = place_layers([narrow, wide], page_tokens=1)
    assert [(place.spec.layer, place.k_offset) for place in places] == [(1, 0), (0, 40)]
    assert page_bytes == 5 * 8 + 5 * 2


def test_layers_of_target_and_draft_with_one_retention_make_one_pool() -> None:
    target = layers_of((2, Full()), (3, Sliding(64)))
    draft = tuple(LayerKV(index, Sliding(64), 1, 8, 8, model="draft") for index in range(2))
    layout = solve_layout(target + draft, MIB, 4)
    assert [(pool.name, len(pool.layers)) for pool in layout.pools] == [("full", 2), ("sliding-64", 5)]


def test_pools_stand_in_a_fixed_order_whatever_the_order_of_the_layers() -> None:
    layers = layers_of((1, State()), (1, Sliding(9)), (1, Chunked(8)), (1, Full()), (1, Sliding(4)))
    names = [pool.name for pool in solve_layout(layers, MIB, 4).pools]
    assert names == ["full", "sliding-4", "sliding-9", "chunked-8", "state"]


def test_page_tokens_can_be_set_for_one_pool_by_name() -> None:
    layers = layers_of((1, Full()), (1, Sliding(64)))
    layout = solve_layout(layers, 16 * MIB, {"sliding-64": 128})
    assert layout.pools[1].page_tokens == 128
    assert layout.pools[0].page_tokens <= 64
    assert layout.granule_tokens == 128


def test_small_windows_get_small_pages_and_large_arenas_no_longer_ones_than_64() -> None:
    layout = solve_layout(MODEL_LAYERS["mimo-v2-flash-like"], 80 * GIB)
    pages = {pool.name: pool.page_tokens for pool in layout.pools}
    assert pages["sliding-128"] <= 16  # 64 would lose up to 17 % of each window
    assert max(pages.values()) <= 64


def test_a_large_arena_affords_a_longer_slab_without_padding_and_a_small_one_does_not() -> None:
    small, large = model_layout("gemma-3-27b", 512 * MIB), model_layout("gemma-3-27b", 80 * GIB)
    assert large.slab_bytes == 65 * MIB // 2
    assert [pool.padding_bytes for pool in large.pools] == [0, 0]
    assert small.slab_bytes < large.slab_bytes


def test_the_layout_of_a_large_arena_does_not_hang_on_single_bytes_of_the_budget() -> None:
    layouts = {model_layout("qwen3-next-80b", 16 * GIB + extra).pools for extra in range(0, GIB, 37 * MIB)}
    assert len(layouts) == 1


@pytest.mark.parametrize("slabs", [2, 3, 5])
def test_an_arena_of_a_few_pages_is_laid_out_too(slabs: int) -> None:
    layers = layers_of((3, Full()), (15, Sliding(8)))
    page_bytes = 15 * 32 * 4
    layout = solve_layout(layers, slabs * page_bytes, 4)
    assert (layout.slabs, layout.slab_bytes) == (slabs, page_bytes)
    assert [pool.pages_per_slab for pool in layout.pools] == [5, 1]


def test_one_byte_below_one_slab_per_pool_is_refused_with_the_bytes_that_would_do() -> None:
    layers = layers_of((3, Full()), (15, Sliding(8)))
    least = 2 * 15 * 32 * 4
    assert solve_layout(layers, least, 4).slabs == 2
    with pytest.raises(ConfigError, match=rf"2 pools x 1920 bytes = {least} bytes.*give more"):
        solve_layout(layers, least - 1, 4)


@pytest.mark.parametrize("budget_bytes", [0, -1])
def test_an_arena_without_bytes_is_refused(budget_bytes: int) -> None:
    with pytest.raises(ConfigError, match="below one slab per pool"):
        solve_layout(layers_of((1, Full())), budget_bytes)


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to lay out"):
        solve_layout((), GIB)


def test_all_faults_of_the_layers_are_told_at_once() -> None:
    layers = (
        LayerKV(0, Full(), 1, 8, 8),
        LayerKV(0, Full(), 1, 8, 8),
        LayerKV(1, Full(), 0, 8, 8),
        LayerKV(2, State()),
        LayerKV(3, Full(), 1, 8, 8, dtype_bytes=0),
    )
    with pytest.raises(ConfigError) as caught:
        solve_layout(layers, GIB)
    assert [problem.split(" layer ")[1][0] for problem in caught.value.problems] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("page_tokens", [0, -4, 3, 48, 512])
def test_page_tokens_must_be_a_power_of_two_up_to_256(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match="power of two from 1 to 256"):
        solve_layout(layers_of((1, Full())), GIB, page_tokens)


def test_page_tokens_of_an_unknown_pool_names_the_pools_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'sliding-65'.*full, sliding-64") as caught:
        solve_layout(layers_of((1, Full()), (1, Sliding(64))), GIB, {"sliding-65": 8, "full": 3})
    assert len(caught.value.problems) == 2


def test_a_state_has_no_page_tokens_to_set() -> None:
    layout = solve_layout(layers_of((1, Full()), (1, State())), GIB, 16)
    assert [pool.page_tokens for pool in layout.pools] == [16, 1]
    with pytest.raises(ConfigError, match="'state'"):
        solve_layout(layers_of((1, Full()), (1, State())), GIB, {"state": 2})


def test_a_model_of_one_kind_of_layer_pads_nothing_and_takes_the_shortest_slab() -> None:
    layout = solve_layout(layers_of((30, Full()), heads=3, dim=64), GIB, 16)
    assert [(pool.pages_per_slab, pool.padding_bytes) for pool in layout.pools] == [(1, 0)]
    assert layout.slab_bytes == 30 * 16 * 3 * 64 * 2 * 2


def test_a_state_is_one_page_of_all_its_layers() -> None:
    layout = solve_layout(QWEN3_NEXT_80B, 16 * GIB, 16)
    state = layout.pools[1]
    assert (state.page_bytes, state.page_tokens, state.is_positional) == (77266944, 1, False)
    assert [place.k_offset for place in state.layers[:3]] == [0, 77266944 // 36, 2 * 77266944 // 36]


@pytest.mark.parametrize("name", MODEL_LAYERS)
def test_solving_a_model_takes_well_under_a_second(name: str) -> None:
    begin = time.process_time()
    solve_layout(MODEL_LAYERS[name], 80 * GIB)
    assert time.process_time() - begin < 0.5


def test_solving_five_unlike_pools_takes_under_a_second() -> None:
    layers = (
        layers_of((11, Full()), heads=5, dim=100)
        + tuple(LayerKV(100 + index, Sliding(1024), 3, 72, 52) for index in range(37))
        + tuple(LayerKV(200 + index, Chunked(8192), 2, 96, 96, 1) for index in range(7))
        + tuple(LayerKV(300 + index, Sliding(128), 4, 64, 64, 4) for index in range(3))
        + tuple(LayerKV(400 + index, State(), state_bytes=1_234_567) for index in range(5))
    )
    begin = time.process_time()
    layout = solve_layout(layers, 16 * GIB)
    assert time.process_time() - begin < 1.0
    assert max(pool.padding_bytes / pool.stride_bytes for pool in layout.pools) < 0.01


def test_page_starts_are_the_same_arithmetic_in_every_slab() -> None:
    """Page p of any pool starts at p * stride, and pages of one slab never reach into the next."""
    layout = model_layout("gemma-3-27b", GIB)
    for pool in layout.pools:
        first_of_second_slab = pool.pages_per_slab
        assert first_of_second_slab * pool.stride_bytes == layout.slab_bytes
        last_end = (pool.pages_per_slab - 1) * pool.stride_bytes + pool.page_bytes
        assert last_end <= layout.slab_bytes


def test_kib_sized_layers_are_counted_in_whole_cache_lines() -> None:
    layout = solve_layout(layers_of((1, Full()), dim=3), 64 * KIB, 1)  # 12 bytes a position
    assert (layout.pools[0].page_bytes, layout.pools[0].stride_bytes) == (12, ceil_to(12, 64))
