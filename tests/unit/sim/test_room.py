"""How much room an arena has: tails against what prompts really read, and the compromise of all rows."""

from __future__ import annotations

import pytest

from halocline.config import parse_policy
from halocline.errors import ConfigError
from halocline.memory.capacity import mix_concurrency, mix_of
from halocline.memory.demand import span
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Full, Positional, Sliding, State
from halocline.memory.sizing import static_caps
from halocline.memory.splits import best_split
from halocline.sim.room import BEST_STATIC, Row, compromise, pool_costs, room
from halocline.units import MIB
from testing.layouts import GEMMA_3_270M, small_layout

ROWS = (Row("short", ((6, 4),)), Row("long", ((120, 8),)), Row("mix", ((6, 4), (6, 4), (120, 8))))


@pytest.mark.parametrize("kind", [Sliding(12), Sliding(9), Sliding(1), Chunked(12), Chunked(7)], ids=str)
def test_a_tail_is_the_most_that_a_prompt_reads_before_a_border(kind: Positional) -> None:
    layout = small_layout(Full(), kind, page_tokens=4)
    pool = layout.pools[1]
    reads = []
    for border in range(4, 400, 4):
        first, _ = span(pool, border, border + 1)
        reads.append(border // 4 - first)
    assert pool_costs(layout)[1].tail_bytes == max(reads) * pool.stride_bytes
    assert pool_costs(layout)[0].tail_bytes == 0


def share(layout: ArenaLayout, ratios: tuple[float, ...]) -> float:
    """Return the worst row's share under a split, of what it has in the shared arena."""
    caps = static_caps(layout, *ratios)
    mixes = [mix_of(layout, row.lengths) for row in ROWS]
    return min(mix_concurrency(layout, caps, mix) / mix_concurrency(layout, None, mix) for mix in mixes)


@pytest.mark.parametrize(
    "kinds",
    [(Full(), Sliding(12)), (Full(), State()), (Full(), Sliding(12), State())],
    ids=lambda kinds: f"{len(kinds)}",
)
def test_the_compromise_serves_its_worst_row_better_than_any_rows_own_split(kinds: tuple[Full, ...]) -> None:
    layout = small_layout(*kinds, page_tokens=4, slabs=300, state_bytes=512)
    best = compromise(layout, ROWS, checkpoints=False)
    assert best is not None
    rule = parse_policy(best.policy)
    assert rule[0] == "static"
    assert share(layout, rule[1:]) == pytest.approx(best.worst_share)
    for row in ROWS:
        own = best_split(layout, mix_of(layout, row.lengths))
        assert own is not None
        ratios = (own.ratio,) if own.state_ratio is None else (own.ratio, own.state_ratio)
        assert share(layout, ratios) <= best.worst_share


def test_there_is_no_compromise_where_one_row_fits_nowhere() -> None:
    layout = small_layout(Full(), Sliding(12), page_tokens=4, slabs=8)
    assert compromise(layout, ROWS, checkpoints=False) is None


def test_policies_that_have_one_page_length_are_compared_under_lengths_by_pool() -> None:
    lengths = {"full": 32, "sliding-512": 16}
    held = room(GEMMA_3_270M, 256 * MIB, lengths, ("shared", "equal-pages", "full"), [Row("a", ((2048, 128),))], False)
    assert [each.requests > 0 for each in held[0]] == [True, True, True]


def test_an_arena_too_small_for_a_policy_holds_none_under_it() -> None:
    held = room(GEMMA_3_270M, 8 * MIB, None, ("shared", "static:0.001", BEST_STATIC), [Row("a", ((20, 5),))], False)
    assert [each.requests for each in held[0]][1] == 0
    assert held[0][0].requests == held[0][2].requests > 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy is 'half'"):
        room(GEMMA_3_270M, 8 * MIB, None, ("half",), ROWS, False)
