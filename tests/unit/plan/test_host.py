"""What a plan says of a host arena is what the engine does with one."""

from __future__ import annotations

import pytest

from halocline.cache.marks import BRANCH_SLACK_TOKENS
from halocline.errors import ConfigError
from halocline.memory.demand import Demand
from halocline.memory.grant import Order, Refusal
from halocline.memory.host import HostArena, HostCosts
from halocline.memory.retention import Full, Sliding, State
from halocline.plan.host import copied_pages, plan_host, prefix_pages
from halocline.sim.room import Row
from halocline.sim.rows import single_row
from testing.schedule import FOUR_POOLS, FULL_AND_WINDOW, MIXED, THREE_POOLS, World, greedy, prompt, rules, tiny_layout

SHAPES = {"window": FULL_AND_WINDOW, "three": THREE_POOLS, "mixed": MIXED, "four": FOUR_POOLS}
ALWAYS = HostCosts(1e12, 1e-3)
"""Every copy is worth it."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_at_most_what_a_plan_says_and_reaches_it(shape: str) -> None:
    """Retract one request after each of its tokens, and look at the copy."""
    layout, most = tiny_layout(SHAPES[shape], 60), [0] * len(SHAPES[shape])
    for outputs in range(1, 16):
        made = World(layout, rules(host_costs=ALWAYS), host_slabs=60)
        made.arrive("a", prompt(13), greedy(16, ignore_eos=True))
        made.run_until(lambda: len(made.outputs["a"]) == outputs)  # noqa: B023
        made.scheduler._roster.retract(made.scheduler._roster.live["a"], offload=True)
        assert made.host is not None
        most = list(map(max, most, made.host.arena.budget.held))
        made.run().assert_all_finished()
    assert tuple(most) == tuple(copied_pages(layout, 13, 16))


@pytest.mark.parametrize("shape", SHAPES)
def test_so_many_copies_fit_and_not_one_more(shape: str) -> None:
    layout = tiny_layout(SHAPES[shape], 60)
    found = plan_host(layout, 24 * layout.slab_bytes + 1, [single_row(13, 16)], keeps_prefixes=True)
    assert (found.slabs, found.arena_bytes) == (24, 24 * layout.slab_bytes)
    host = HostArena(layout, found.quota_bytes)
    for number in range(found.retracted[0]):
        assert not isinstance(host.reserve(f"copy {number}", copied_pages(layout, 13, 16)), Refusal)
    assert isinstance(host.reserve("one more", copied_pages(layout, 13, 16)), Refusal)


def test_a_mix_is_rounded_up_once_for_all_its_requests() -> None:
    layout = tiny_layout(FULL_AND_WINDOW, 60)
    rows = [Row("mix", ((5, 2), (40, 8))), single_row(5, 2), single_row(40, 8)]
    mix, small, large = plan_host(layout, 40 * layout.slab_bytes, rows, keeps_prefixes=True).retracted
    assert large <= mix <= small
    both = copied_pages(layout, 5, 2).plus(copied_pages(layout, 40, 8))
    held = [0] * len(both)
    for number in range(mix):
        held = [*map(sum, zip(held, copied_pages(layout, *rows[0].lengths[number % 2]), strict=True))]
    assert sum(-(-pages // pool.pages_per_slab) for pages, pool in zip(held, layout.pools, strict=True)) <= 40


@pytest.mark.parametrize("tokens", [40, BRANCH_SLACK_TOKENS + 5, BRANCH_SLACK_TOKENS + 131])
@pytest.mark.parametrize(
    "pools", [((Full(), 4, 3), (Sliding(24), 4, 1)), ((Full(), 4, 3), (Sliding(24), 4, 1), (State(), 1, 1))]
)
def test_a_prefix_takes_what_is_written_back_when_the_device_gives_it_up(pools: tuple, tokens: int) -> None:
    layout = tiny_layout(pools, 400)
    made = World(layout, rules(prefix_cache=True, host_costs=ALWAYS, max_model_len=4096), host_slabs=400)
    made.arrive("a", prompt(tokens), 1)
    made.run()
    nothing = Demand([0] * len(pools))
    crowd = made.arena.reserve("crowd", Demand((made.arena.most(0, nothing), *nothing[1:])))
    assert not isinstance(crowd, Refusal)
    done = made.arena.commit([Order(crowd, crowd.demand)])
    made.scheduler._sharing.forget(done.evicted, done.moves)
    boundary, pages = prefix_pages(layout, tokens)
    cache = made.scheduler.figures().cache
    assert cache is not None
    assert cache.tier is not None
    assert boundary == tokens // 4 * 4
    assert (cache.tier.written, cache.tier.written_bytes) == (
        1,
        sum(count * pool.stride_bytes for count, pool in zip(pages, layout.pools, strict=True)),
    )


def test_prefixes_are_told_in_tokens_and_only_with_a_prefix_cache() -> None:
    layout = tiny_layout(FULL_AND_WINDOW, 60)
    (cost,) = plan_host(layout, 40 * layout.slab_bytes, [single_row(41, 8)], keeps_prefixes=True).costs
    assert cost.prefix_tokens == 40
    assert cost.held_tokens == 40 * cost.prefixes > 0
    host = HostArena(layout, 40 * layout.slab_bytes)
    pages = prefix_pages(layout, 41)[1]
    assert host.arena.fits(Demand(count * cost.prefixes for count in pages))
    assert not host.arena.fits(Demand(count * (cost.prefixes + 1) for count in pages))
    (without,) = plan_host(layout, 40 * layout.slab_bytes, [single_row(41, 8)], keeps_prefixes=False).costs
    assert (without.prefix_tokens, without.prefixes, without.held_tokens) == (0, 0, 0)
    (short,) = plan_host(layout, 40 * layout.slab_bytes, [single_row(3, 8)], keeps_prefixes=True).costs
    assert short.prefix_tokens == 0, "no whole granule"


def test_a_quota_below_a_slab_is_refused_as_at_start() -> None:
    layout = tiny_layout(FULL_AND_WINDOW, 60)
    with pytest.raises(ConfigError, match="less than one slab"):
        plan_host(layout, layout.slab_bytes - 1, [single_row(5, 2)], keeps_prefixes=True)
