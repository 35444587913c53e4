"""H2, H4, H5, H7 and H9 of the scenarios: bytes under pressure, each with the policy that gets it wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.errors import InvariantError
from halocline.memory import moves, pins
from halocline.memory.arena import Arena
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, resident, zero
from halocline.memory.grant import Grant, Refusal
from halocline.memory.reclaim import reclaim_plan
from halocline.units import ceil_div
from testing.memory import World, arena, as_handles

Price = Callable[[int, int], Demand]


# ---- H2: a demand rounded twice


def longest_generation(some: Arena, price: Price, prompt_tokens: int) -> int:
    """The most tokens that fit after the prompt, asked of the arena one by one."""
    tokens = 0
    while some.fits(price(prompt_tokens, tokens + 1)):
        tokens += 1
    return tokens


def h2(price: Price) -> None:
    """Pages of 4 tokens, 3 of them: a need of 10 positions fits, and so do 12."""
    some = arena(full=1, slabs=3, page_tokens=4)
    assert some.fits(price(8, 3))
    assert longest_generation(some, price, prompt_tokens=10) == 3
    assert longest_generation(some, price, prompt_tokens=12) == 1


def test_h2_a_need_is_rounded_to_pages_once():
    some = arena(full=1, slabs=3, page_tokens=4)
    h2(lambda prompt, new: resident(some.layout, prompt, new))


def test_h2_bites_a_price_that_adds_a_page_of_slack_before_it_rounds_again():
    """A need of 10 priced as 13, which clips the generation to nothing."""
    with pytest.raises(AssertionError):
        h2(lambda prompt, new: Demand([ceil_div(prompt + new - 1 + 3, 4)]))


def h2_in_slabs() -> None:
    """Slabs of 4 pages: 5 held and 3 more are 8 pages and two slabs."""
    world = World(arena(full=4, slabs=2, page_tokens=4))
    world.reserve(Demand([5]))
    world.commit_all()
    assert world.reserve(Demand([3])) is not None
    world.commit_all()
    assert world.arena.figures().free_bytes == 0
    assert world.reserve(Demand([1])) is None


def test_h2_pages_are_rounded_to_slabs_once():
    h2_in_slabs()


def test_h2_bites_a_predicate_that_rounds_what_is_held_and_what_is_asked_apart(monkeypatch):
    def fits(self, extra):
        return self.slabs_needed(self.held) + self.slabs_needed(extra) <= self.slabs

    monkeypatch.setattr(Budget, "fits", fits)
    with pytest.raises(AssertionError):
        h2_in_slabs()


# ---- H4: half empty, nothing evictable


def half_empty(caps: tuple[int | None, ...] | None) -> World:
    """Four slabs (static split: four of eight), each with one pinned full page and one hole."""
    world = World(arena(full=2, sliding=3, slabs=4 if caps is None else 8, caps=caps), caps)
    owner = world.reserve(Demand((8, 0)))
    world.commit_all()
    world.pin([owner.handles[0][::2], []])
    world.free(owner, 0, owner.handles[0][1::2])
    world.arena.shrink(owner.grant, owner.grant.held)
    return world


H4 = [(None, (0, 1), "memory"), ((4, 4), (5, 0), "cap")]


def h4(caps, demand, reason) -> None:
    world = half_empty(caps)
    figures = world.arena.figures()
    assert figures.hole_bytes == figures.used_bytes
    refusal = world.arena.reserve("request-8", Demand(demand))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert str(refusal.slabs_missing) in refusal.message
    world.check()
    world.unpin(world.pins[0])
    world.release(world.holdings[0])
    assert world.reserve(Demand(demand)) is not None
    world.commit_all()
    world.check()


@pytest.mark.parametrize(("caps", "demand", "reason"), H4)
def test_h4_half_empty_and_nothing_evictable_is_a_reason_and_no_assertion(caps, demand, reason):
    h4(caps, demand, reason)


@pytest.mark.parametrize(("caps", "demand", "reason"), H4)
def test_h4_bites_a_scalar_of_available_bytes(caps, demand, reason, monkeypatch):
    def fits(self, extra):
        pages = map(sum, zip(self.held, self.promised, extra, strict=True))
        return sum(count / k for count, k in zip(pages, self.pages_per_slab, strict=True)) <= self.slabs

    monkeypatch.setattr(Budget, "fits", fits)
    with pytest.raises(AssertionError):
        h4(caps, demand, reason)


# ---- H5: a transfer in progress


def h5(caps: tuple[int | None, ...] | None) -> None:
    """One full page is in transfer, the others are cached; three window pages take three slabs (two in the split)."""
    world = World(arena(full=2, sliding=1, slabs=4, caps=caps), caps)
    owner = world.reserve(Demand((4 if caps else 8, 0)))
    world.commit_all()
    world.pin([owner.handles[0][:1], []])
    world.cache(owner, 0, owner.handles[0][1:])
    world.release(owner)
    assert world.reserve(Demand((3, 2) if caps else (0, 3))) is not None
    world.commit_all()
    assert world.evictions > 0
    assert world.arena.budget.transfer == [1, 0]
    world.check()


@pytest.mark.parametrize("caps", [None, (2, 2)])
def test_h5_a_transfer_does_not_stop_reclaim_of_unrelated_pages(caps):
    h5(caps)


@pytest.mark.parametrize("caps", [None, (2, 2)])
def test_h5_bites_a_reclaim_that_leaves_a_pool_with_pins_alone(caps, monkeypatch):
    def plan(pressure):
        spared = [0 if pinned else count for count, pinned in zip(pressure.cached, pressure.pinned_slabs, strict=True)]
        fixed = map(sum, zip(pressure.fixed, pressure.cached, [-count for count in spared], strict=True))
        return reclaim_plan(moves.Pressure(**{**fields(pressure), "fixed": tuple(fixed), "cached": tuple(spared)}))

    monkeypatch.setattr(moves, "reclaim_plan", plan)
    with pytest.raises(InvariantError, match="L3"):
        h5(caps)


def fields(pressure: moves.Pressure) -> dict[str, object]:
    return {name: getattr(pressure, name) for name in pressure.__slots__}


# ---- H7: figures that overstate jointly


def h7() -> None:
    some = arena(full=1, sliding=1, slabs=511, page_tokens=1)
    assert [pool.capacity_tokens for pool in some.figures().pools] == [511, 511]
    assert isinstance(some.reserve("both", Demand((511, 511))), Refusal)
    assert isinstance(some.reserve("both", Demand((256, 256))), Refusal)
    granted = some.reserve("both", Demand((255, 255)))
    assert isinstance(granted, Grant)
    assert [pool.capacity_tokens for pool in some.figures().pools] == [256, 256]


def test_h7_pools_are_never_judged_one_by_one():
    h7()


def test_h7_bites_a_decision_by_displayed_figures(monkeypatch):
    def fits(self, extra):
        return all(count <= self.display_pages(pool) for pool, count in enumerate(extra))

    monkeypatch.setattr(Budget, "fits", fits)
    with pytest.raises(AssertionError):
        h7()


# ---- H9: a pin or a lock between grant and commit


def h9_pin() -> None:
    """Two held pages in two slabs of three; the third slab is granted to a state, then both pages are pinned."""
    world = World(arena(full=3, state=1, slabs=2))
    owner = world.reserve(Demand((6, 0)))
    world.commit_all()
    world.free(owner, 0, owner.handles[0][1:5])
    world.arena.shrink(owner.grant, owner.grant.held)
    granted = world.reserve(Demand((0, 1)))
    assert granted is not None
    pin = world.pin([owner.handles[0], []])
    world.commit_all()
    assert pin.is_in_force
    assert len(granted.handles[1]) == 1
    world.check()


def test_h9_a_pin_between_grant_and_commit_is_made_to_fit_by_moves():
    h9_pin()


def test_h9_bites_a_pin_that_does_not_gather(monkeypatch):
    enforce = pins._try_enforce

    def always(pool, budget, index):
        promised, budget.promised = budget.promised, [100, 100]
        done = enforce(pool, budget, index)
        budget.promised = promised
        return done

    monkeypatch.setattr(pins, "_try_enforce", always)
    with pytest.raises(InvariantError, match="L3"):
        h9_pin()


class LaxArena(Arena):
    """Locks what it is told to without asking the budget."""

    def lock(self, owner, handles, demand):
        promised, self.budget.promised = self.budget.promised, zero_list(self)
        held, self.budget.held = self.budget.held, zero_list(self)
        granted = super().lock(owner, handles, demand)
        self.budget.promised = promised
        self.budget.held = [a + b for a, b in zip(held, self.budget.held, strict=True)]
        return granted


def zero_list(some: Arena) -> list[int]:
    return list(zero(len(some.layout.pools)))


def h9_lock(kind: type[Arena]) -> None:
    """Everything is cached, all of it is granted to somebody; a lock of one cached page has to be refused."""
    world = World(kind(arena(full=3, state=1, slabs=2).layout))
    owner = world.reserve(Demand((6, 0)))
    world.commit_all()
    told = list(owner.handles[0])
    world.cache(owner, 0, told)
    world.release(owner)
    granted = world.reserve(Demand((0, 2)))
    assert granted is not None
    refused = world.arena.lock("hit", [as_handles(told[:1]), as_handles([])], Demand((0, 0)))
    world.commit_all()
    assert isinstance(refused, Refusal)
    assert len(granted.handles[1]) == 2
    world.check()


def test_h9_a_lock_between_grant_and_commit_is_refused_where_it_does_not_fit():
    h9_lock(Arena)


def test_h9_bites_a_lock_without_a_price():
    with pytest.raises(InvariantError, match="L3"):
        h9_lock(LaxArena)
