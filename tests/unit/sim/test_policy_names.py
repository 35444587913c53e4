"""Policies by name: what each makes of the same layers and bytes."""

from __future__ import annotations

import pytest

from halocline.errors import ConfigError
from halocline.memory.layout import LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding, State
from halocline.memory.sizing import static_caps
from halocline.sim.policies import equal_groups, policy_named
from halocline.units import GIB, MIB
from testing.layouts import GEMMA_3_27B, QWEN3_NEXT_80B


def test_shared_and_static_are_the_engines_own_layout_and_caps() -> None:
    layout = solve_layout(GEMMA_3_27B, 8 * GIB, 16)
    shared, split = policy_named("shared"), policy_named("static:0.5")
    assert shared.lay_out(GEMMA_3_27B, 8 * GIB, 16) == split.lay_out(GEMMA_3_27B, 8 * GIB, 16) == layout
    assert shared.split(layout) is None
    assert split.split(layout) == static_caps(layout, 0.5)
    with_states = solve_layout(QWEN3_NEXT_80B, 8 * GIB, 16)
    assert policy_named("static:0.5:0.3").split(with_states) == static_caps(with_states, 0.5, 0.3)
    assert policy_named("static:0.5").make(GEMMA_3_27B, 8 * GIB, 16).budget.caps == list(static_caps(layout, 0.5))


def test_page_lengths_are_solved_where_none_is_set() -> None:
    assert policy_named("shared").lay_out(GEMMA_3_27B, 8 * GIB, None) == solve_layout(GEMMA_3_27B, 8 * GIB)


def test_full_keeps_every_position_and_ignores_the_page_lengths_of_windows() -> None:
    layout = policy_named("full").lay_out(GEMMA_3_27B, 8 * GIB, {"full": 32, "sliding-1024": 8})
    assert [(pool.name, pool.page_tokens, len(pool.layers)) for pool in layout.pools] == [("full", 32, 62)]
    with_states = policy_named("full").lay_out(QWEN3_NEXT_80B, 8 * GIB, 16)
    assert [pool.name for pool in with_states.pools] == ["full", "state"]


def test_equal_pages_have_one_size_for_all_and_say_what_cannot_be() -> None:
    policy = policy_named("equal-pages")
    layout = policy.lay_out(GEMMA_3_27B, 8 * GIB, None)
    assert {(pool.page_tokens, pool.stride_bytes, pool.pages_per_slab) for pool in layout.pools} == {
        (16, layout.slab_bytes, 1)
    }
    assert len(layout.pools) == 1 + 6  # 52 windows in groups of 10
    with pytest.raises(ConfigError, match="one page length"):
        policy.lay_out(GEMMA_3_27B, 8 * GIB, {"full": 16})
    with pytest.raises(ConfigError, match="below one page per group: 7 groups"):
        policy.lay_out(GEMMA_3_27B, MIB, 16)


def test_equal_pages_of_states_alone_are_as_long_as_the_longest_state() -> None:
    states = tuple(LayerKV(index, State(), state_bytes=size) for index, size in enumerate((1000, 1000, 600)))
    groups, room, place = equal_groups(states)
    assert (len(groups), room, place) == (3, 1, 1000)
    narrow = (LayerKV(0, Full(), 2, 64, 64), LayerKV(1, Sliding(64), 1, 64, 64))
    assert [group.page_tokens for group in equal_groups(narrow, 16)[0]] == [16, 32]


@pytest.mark.parametrize(
    "name", ["", "Shared", "static", "static:", "static:0", "static:-1", "equal pages", "static:1:0"]
)
def test_an_unknown_policy_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"static:R:S .* also knows equal-pages and full"):
        policy_named(name)
