"""Sizing: how much fits, what a static split is, and what start-up refuses."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from halocline.errors import ConfigError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.memory.sizing import (
    UNLIMITED_TOKENS,
    Caps,
    Limits,
    ModelLength,
    auto_device_kv_bytes,
    auto_kv_bytes,
    capacity_facts,
    check_start,
    concurrency,
    exact_concurrency,
    longest_request,
    start_problems,
    static_caps,
    uniform_concurrency,
)
from halocline.units import GIB, MIB
from testing.layouts import MODEL_LAYERS, model_layout, small_layout
from testing.schedule import tiny_layout

LIMITS = Limits(step_tokens=512, max_running_requests=16)


def resized(layout: ArenaLayout, slabs: int) -> ArenaLayout:
    return replace(layout, slabs=slabs, budget_bytes=slabs * layout.slab_bytes)


@pytest.mark.parametrize("name", MODEL_LAYERS)
def test_the_printed_concurrency_fits_and_one_request_more_does_not(name: str) -> None:
    layout = model_layout(name, 16 * GIB)
    one, floor = resident(layout, 2048, 128), floor_demand(layout)
    requests = concurrency(layout, None, 2048, 128)
    assert requests > 0
    assert Budget(layout).fits_empty(Demand(requests * pages for pages in one).plus(floor))
    assert not Budget(layout).fits_empty(Demand((requests + 1) * pages for pages in one).plus(floor))


def test_concurrency_leaves_room_for_the_floor() -> None:
    layout = small_layout(Full(), Sliding(6), page_tokens=4)
    slabs = sum(resident(layout, 20, 5))  # one page is one slab here
    assert concurrency(resized(layout, 3 * slabs), None, 20, 5) == 2
    assert concurrency(resized(layout, 3 * slabs + 1), None, 20, 5) == 3


def test_the_printed_concurrency_leaves_the_spare_state_out_that_prefix_caching_sets_aside() -> None:
    layout = tiny_layout(((Full(), 4, 1), (State(), 1, 1)), 3 * (6 + 1))  # three of 6 pages and a state, to the slab

    def shown(checkpoints: bool) -> list[tuple[int, int]]:
        limits = replace(LIMITS, max_model_len=24, checkpoints=checkpoints)
        return [(row.requests, row.static_requests) for row in capacity_facts(layout, (18, 3), limits).concurrency]

    assert shown(checkpoints=False) == [(3, 2)]
    assert shown(checkpoints=True) == [(2, 2)]


def test_a_uniform_cache_pays_for_whole_pages_too() -> None:
    layout = resized(small_layout(Full(), Sliding(6), page_tokens=4), 11)  # 22 pages of 4 positions of one layer
    assert uniform_concurrency(layout, 3, 1) == 5  # one page of each of two layers, both 128 bytes
    assert uniform_concurrency(layout, 4, 2) == 2


def test_a_uniform_cache_does_not_store_the_last_token_either() -> None:
    layout = resized(small_layout(Full(), Sliding(6), page_tokens=4), 11)
    assert uniform_concurrency(layout, 4, 1) == 5
    assert uniform_concurrency(layout, 1, 4) == 5


def test_where_every_layer_is_full_the_uniform_cache_holds_as_many_as_the_arena() -> None:
    layout = small_layout(Full(), page_tokens=4, slabs=9)
    length = longest_request(layout)
    facts = capacity_facts(layout, None, replace(LIMITS, step_tokens=64, max_model_len=length))
    row = facts.concurrency[-1]
    assert (row.prompt_tokens, row.output_tokens) == (length - 1, 1)
    assert (row.requests, row.static_requests, row.uniform_requests) == (1, 1, 1)


@pytest.mark.parametrize("slabs", range(1, 30))
def test_galloping_finds_the_same_longest_request_as_counting_up(slabs: int) -> None:
    layout = resized(small_layout(Full(), Sliding(6), page_tokens=4), slabs)
    floor = floor_demand(layout)
    fitting = [
        tokens for tokens in range(2, 200) if Budget(layout).fits_empty(resident(layout, 1, tokens - 1).plus(floor))
    ]
    assert longest_request(layout) == max(fitting, default=0)


def test_lookahead_and_checkpoints_take_room_from_the_longest_request() -> None:
    layout = resized(small_layout(Full(), Sliding(8), State(), page_tokens=4, state_bytes=128), 20)
    assert longest_request(layout, lookahead_tokens=6) < longest_request(layout)
    assert longest_request(layout, checkpoints=True) < longest_request(layout)


def test_a_model_without_full_attention_has_no_longest_request() -> None:
    layout = small_layout(Sliding(8), page_tokens=4)
    assert longest_request(layout) == UNLIMITED_TOKENS
    assert check_start(layout, None, replace(LIMITS, model_tokens=4096)) == ModelLength(4096, "model")


def test_the_yardsticks_of_the_bench_are_18_exact_and_6_uniform() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    assert exact_concurrency(layout, 2048, 128) == 18
    assert uniform_concurrency(layout, 2048, 128) == 6
    assert concurrency(layout, None, 2048, 128) == 18


def test_the_static_split_of_the_windows_is_a_ratio_of_the_full_pools_tokens() -> None:
    layout = model_layout("gemma-3-27b", 40 * GIB)
    full, sliding = static_caps(layout, 0.8)
    assert full is not None
    assert sliding is not None
    assert full + sliding == layout.slabs
    tokens = [slabs * pool.pages_per_slab * 16 for slabs, pool in zip((full, sliding), layout.pools, strict=True)]
    assert tokens[1] / tokens[0] == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("slabs", [2, 5, 11, 100, 997])
@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.8, 1.0, 2.5])
def test_no_window_pool_gets_more_than_its_ratio_and_no_slab_is_lost(slabs: int, ratio: float) -> None:
    layout = resized(small_layout(Full(), Sliding(6), Chunked(8), page_tokens=4), slabs)
    full, *windows = static_caps(layout, ratio)
    assert full is not None
    assert full + sum(cap or 0 for cap in windows) == slabs
    assert all((cap or 0) <= Fraction(str(ratio)) * full for cap in windows)


def test_a_ratio_is_taken_as_written_not_as_its_binary_neighbour() -> None:
    layout = resized(small_layout(Full(), Sliding(6), page_tokens=4), 129)
    assert static_caps(layout, 0.29) == (100, 29)  # 0.29 * 100 is 28.999999999999996 in floating point


def test_states_get_their_share_before_the_tokens_are_split() -> None:
    layout = resized(small_layout(Full(), Sliding(6), State(), page_tokens=4, state_bytes=128), 190)
    assert static_caps(layout, 1.0) == (50, 50, 90)
    assert static_caps(layout, 1.0, state_ratio=0.0) == (95, 95, 0)


def test_the_states_share_is_taken_as_written_not_as_its_binary_neighbour() -> None:
    layout = resized(small_layout(Full(), State(), page_tokens=4), 165)
    assert static_caps(layout, 0.8, 0.1)[1] == 15  # 165 * 0.1 / 1.1, exactly


def test_a_single_pool_has_the_whole_arena_under_a_static_split() -> None:
    assert static_caps(small_layout(Full(), slabs=9), 0.8) == (9,)
    assert static_caps(small_layout(State(), slabs=9), 0.8) == (9,)


def test_without_a_full_pool_the_first_window_is_the_measure() -> None:
    assert static_caps(resized(small_layout(Sliding(4), Sliding(8)), 30), 0.5) == (20, 10)


@pytest.mark.parametrize(("free_bytes", "kv_bytes"), [(8 * GIB, 2 * GIB), (64 * GIB, 4 * GIB), (1001, 250)])
def test_auto_on_a_cpu_is_a_quarter_of_free_memory_at_most_4_gib(free_bytes: int, kv_bytes: int) -> None:
    assert auto_kv_bytes(free_bytes) == kv_bytes


def test_auto_on_a_device_is_what_weights_and_activations_leave() -> None:
    assert auto_device_kv_bytes(80 * GIB, 54 * GIB, 2 * GIB) == 24 * GIB
    with pytest.raises(ConfigError, match=r"16 GiB.*54 GiB.*nothing is left"):
        auto_device_kv_bytes(16 * GIB, 54 * GIB, 0)


def test_the_model_length_is_the_models_own_when_that_fits() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    assert check_start(layout, None, replace(LIMITS, model_tokens=32_768)) == ModelLength(32_768, "model")


def test_the_model_length_is_the_longest_that_fits_when_that_is_less() -> None:
    layout = model_layout("gemma-3-270m", 64 * MIB)
    length = check_start(layout, None, replace(LIMITS, model_tokens=32_768))
    assert length == ModelLength(longest_request(layout), "arena")
    assert length.tokens < 32_768


def test_a_model_length_that_is_set_and_possible_is_kept() -> None:
    layout = model_layout("gemma-3-270m", 64 * MIB)
    assert check_start(layout, None, replace(LIMITS, model_tokens=32_768, max_model_len=1000)).limited_by == "setting"


def test_a_model_length_beyond_the_arena_is_refused_with_the_longest_that_would_do() -> None:
    layout = model_layout("gemma-3-270m", 64 * MIB)
    longest = longest_request(layout)
    problems = start_problems(layout, None, replace(LIMITS, max_model_len=longest + 1))
    assert len(problems) == 1
    assert f"max_model_len is {longest + 1}, but the longest request that fits is {longest} tokens" in problems[0]
    assert start_problems(layout, None, replace(LIMITS, max_model_len=longest)) == []


def test_a_model_length_beyond_the_models_own_is_refused() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    problems = start_problems(layout, None, replace(LIMITS, model_tokens=1000, max_model_len=1001))
    assert problems == ["max_model_len is 1001, but the model's own limit is 1000 tokens; set at most 1000"]


@pytest.mark.parametrize(("step_tokens", "running", "lookahead"), [(31, 16, 0), (47, 16, 1), (20, 1, 3)])
def test_step_tokens_must_leave_a_granule_beside_all_decodes(step_tokens: int, running: int, lookahead: int) -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    need = running * (1 + lookahead) + 16
    limits = Limits(step_tokens, running, lookahead_tokens=lookahead)
    problems = start_problems(layout, None, limits)
    if step_tokens < need:
        assert len(problems) == 1
        assert f"x (1 + {lookahead} lookahead) + one granule of 16 = {need} tokens" in problems[0]
    else:
        assert problems == []
    assert start_problems(layout, None, replace(limits, step_tokens=need)) == []


def test_all_problems_are_listed_at_once() -> None:
    layout = model_layout("gemma-3-270m", 3 * MIB)
    with pytest.raises(ConfigError) as caught:
        check_start(layout, (12, 0), Limits(200, 256, model_tokens=32_768, max_model_len=40_000))
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "step_tokens",
        "the",  # the static split leaves the window pool no slab
        "the",  # the arena cannot hold one window
        "max_model_len",  # beyond the model
        "max_model_len",  # beyond the arena
    ]


def test_an_arena_too_small_for_its_window_starts_when_requests_are_kept_shorter() -> None:
    layout = model_layout("gemma-3-270m", 3 * MIB)
    assert len(start_problems(layout, None, LIMITS)) == 1
    assert start_problems(layout, None, replace(LIMITS, max_model_len=145)) == []
    assert start_problems(layout, None, replace(LIMITS, model_tokens=145)) == []


def test_an_arena_in_which_nothing_at_all_fits_says_so() -> None:
    layout = resized(small_layout(Full(), Chunked(4), page_tokens=4), 2)
    problems = start_problems(layout, None, LIMITS)
    assert len(problems) == 1
    assert "together 3 slabs" in problems[0]


def test_a_model_of_a_single_token_cannot_be_served() -> None:
    problems = start_problems(model_layout("gemma-3-270m", 256 * MIB), None, replace(LIMITS, model_tokens=1))
    assert problems == ["a length of 1 tokens (the model's own limit) leaves no room for one in and one out"]


def test_the_facts_are_the_same_numbers_as_the_questions() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    facts = capacity_facts(layout, None, replace(LIMITS, model_tokens=32_768))
    assert facts.slabs * facts.slab_bytes + facts.remainder_bytes == facts.budget_bytes == 256 * MIB
    assert facts.longest_request_tokens == longest_request(layout)
    row = next(row for row in facts.concurrency if (row.prompt_tokens, row.output_tokens) == (2048, 128))
    assert (row.requests, row.static_requests, row.uniform_requests) == (18, 8, 6)


def test_the_facts_show_only_lengths_that_are_served_and_the_longest_itself() -> None:
    facts = capacity_facts(model_layout("gemma-3-270m", 256 * MIB), None, replace(LIMITS, max_model_len=1000))
    assert [(row.prompt_tokens, row.output_tokens) for row in facts.concurrency] == [(256, 64), (999, 1)]


def test_the_facts_of_a_static_split_count_under_its_own_caps() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    split = capacity_facts(layout, static_caps(layout, 0.8), replace(LIMITS, max_model_len=4096))
    assert all(row.requests == row.static_requests for row in split.concurrency)
    assert [pool.cap_slabs for pool in split.pools] == [220, 872]


def test_the_capacity_block_says_what_a_reader_asks_first() -> None:
    layout = model_layout("gemma-3-270m", 256 * MIB)
    block = "\n".join(capacity_facts(layout, None, replace(LIMITS, model_tokens=32_768)).lines())
    for text in (
        "arena 256 MiB = 1092 slabs of 240 KiB (budget 256 MiB, remainder 64 KiB)",
        "pool full: 3 layers, page 48 KiB (16 positions), 5 per slab, padding 0 B (0.00%)",
        "pool sliding-512: 15 layers, page 240 KiB (16 positions), 1 per slab, padding 0 B (0.00%)",
        "longest request 84641 tokens; max_model_len 32768 (the model's own limit)",
    ):
        assert text in block


def test_the_capacity_block_calls_a_policy_what_plan_and_replay_call_it() -> None:
    layout, limits = model_layout("gemma-3-270m", 256 * MIB), replace(LIMITS, max_model_len=4096)

    def heads(caps: Caps | None) -> list[str]:
        head = next(line for line in capacity_facts(layout, caps, limits).lines() if line.startswith("requests"))
        return head.removeprefix("requests at once, prompt + output").split()

    assert heads(None) == ["shared", "static:0.8", "full"]
    assert heads(static_caps(layout, 0.5)) == ["as", "set", "static:0.8", "full"]


def test_the_capacity_block_names_states_and_shares() -> None:
    layout = model_layout("qwen3-next-80b", 16 * GIB)
    facts = capacity_facts(layout, static_caps(layout, 0.8), replace(LIMITS, model_tokens=4096))
    assert "(one state), 1 per slab, padding 192 KiB (0.25%), at most 104 slabs" in "\n".join(facts.lines())


def test_sizing_a_large_model_takes_milliseconds_of_questions_not_a_scan() -> None:
    """Counted, not timed: the longest request of a 16 GiB arena is found by a few dozen prices."""
    layout, asked = model_layout("llama-4-scout", 16 * GIB), []

    class Counting(Budget):
        def fits_empty(self, demand: Demand) -> bool:
            asked.append(demand)
            return super().fits_empty(demand)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halocline.memory.capacity.Budget", Counting)
        longest_request(layout)
    assert len(asked) < 45
