"""Figures by hand: what a display shows of a small arena."""

from __future__ import annotations

from halocline.memory.demand import Demand
from testing.memory import World, arena


def shown() -> World:
    """Slabs of 3 full or 2 window pages; 4 full pages (2 cached, 1 locked, 1 in transfer), 2 window, 1 promised."""
    world = World(arena(full=3, sliding=2, slabs=5))
    owner = world.reserve(Demand((4, 3)))
    world.commit([(owner, Demand((4, 2)), None)])
    pin = world.pin([owner.handles[0][3:], []])
    assert pin.is_in_force
    told = owner.handles[0][:3]
    world.cache(owner, 0, told)
    world.lock([told[:1], []], Demand((0, 0)))
    world.free(owner, 0, list(owner.handles[0]))
    world.arena.shrink(owner.grant, Demand((0, 3)))
    world.check()
    return world


def test_every_byte_is_somewhere():
    figures = shown().arena.figures()
    full, window, slab = 2 * 64, 3 * 64, 6 * 64
    assert figures.total_bytes == 5 * slab
    assert (figures.cached_bytes, figures.locked_bytes, figures.transfer_bytes) == (2 * full, full, full)
    assert figures.running_bytes == 2 * window
    assert figures.used_bytes == 4 * full + 2 * window
    assert figures.hole_bytes == 2 * full
    assert figures.free_bytes == 2 * slab
    assert figures.promised_bytes == window


def test_a_pools_tokens_are_its_live_pages_and_the_most_it_could_add():
    full, sliding = shown().arena.figures().pools
    assert (full.slabs, full.live_tokens, full.capacity_tokens) == (2, 4 * 16, 9 * 16)
    assert (sliding.slabs, sliding.live_tokens, sliding.capacity_tokens) == (1, 2 * 16, 6 * 16)


def test_an_empty_arena_is_free():
    figures = arena(full=3, sliding=2, slabs=5).figures()
    assert figures.free_bytes == figures.total_bytes
    assert (figures.used_bytes, figures.padding_bytes, figures.remainder_bytes) == (0, 0, 0)
