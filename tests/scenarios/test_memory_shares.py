"""G1, B2, B3, H1 and H3 of the scenarios at the level of the arena: who shares which bytes, at the shipped prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from halocline.errors import InvariantError
from halocline.memory import moves
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, zero
from halocline.memory.grant import Grant, Order, Refusal
from halocline.memory.reclaim import Plan, reclaim_plan
from halocline.units import ceil_div
from testing.memory import World, arena

# ---- G1: four retracted requests of 574 tokens want to resume

PROMPT_TOKENS, LEFT_TOKENS = 574, 67
Admits = Callable[[Arena, int], bool]
"""Whether one more resumes beside so many that have."""


def by_pages(some: Arena, resumed: int) -> bool:
    del resumed
    return some.fits(resident(some.layout, PROMPT_TOKENS, LEFT_TOKENS))


def by_tokens(some: Arena, resumed: int) -> bool:
    return (resumed + 1) * PROMPT_TOKENS <= 18 * some.layout.pools[0].page_tokens


def g1(admits: Admits, caps: tuple[int, int] | None, left: int) -> None:
    some = arena(full=1, sliding=1, slabs=36, caps=caps, page_tokens=128, window_tokens=2047)
    demand = resident(some.layout, PROMPT_TOKENS, LEFT_TOKENS)
    assert demand == (5, 5)
    resumed = 0
    for number in range(4):
        if admits(some, resumed):
            some.reserve(f"request-{number}", demand)
            resumed += 1
    assert resumed == 3
    assert [some.most(pool, zero(2)) for pool in range(2)] == [left, left]
    refusal = some.shortfall(demand)
    assert refusal is not None
    assert "15 promised + 5 asked = 20 pages" in refusal.message


SHARES = [((18, 18), 3), (None, 6)]


@pytest.mark.parametrize(("caps", "left"), SHARES)
def test_g1_exactly_three_resume_and_the_fourth_has_its_reason(caps, left):
    g1(by_pages, caps, left)


@pytest.mark.parametrize(("caps", "left"), SHARES)
def test_g1_bites_a_demand_counted_in_tokens(caps, left):
    with pytest.raises(AssertionError):
        g1(by_tokens, caps, left)


# ---- B2: recurrent states and short prompts


def b2(pages_per_slab: int) -> None:
    """64 prompts of 12 tokens: 64 states, and 64 full pages of which 197 make a state."""
    some = arena(full=pages_per_slab, state=1, slabs=65)
    demand = resident(some.layout, 12, 1)
    for number in range(64):
        granted = some.reserve(f"request-{number}", demand)
        assert isinstance(granted, Grant)
        some.commit([Order(granted, demand)])
    one = some.layout.slab_bytes * (1 + 1 / 197)
    assert some.figures().used_bytes == pytest.approx(64 * one, rel=0.01)
    assert some.audit() == []


def test_b2_a_short_prompt_costs_one_state_and_one_page():
    b2(pages_per_slab=197)


def test_b2_bites_pages_of_equal_bytes():
    with pytest.raises(AssertionError):
        b2(pages_per_slab=1)


# ---- B3: a state does not grow with tokens


def b3(price: Callable[[Arena], Demand]) -> None:
    """Room for one state and for 1,301 tokens of full pages."""
    some = arena(full=100, state=1, slabs=2)
    granted = some.reserve("request-7", price(some))
    assert isinstance(granted, Grant)
    some.commit([Order(granted, granted.demand)])
    assert some.figures().pools[1].live_tokens == 1


def test_b3_one_request_holds_one_state_however_long_it_is():
    b3(lambda some: resident(some.layout, 1301, 1))


def test_b3_bites_a_state_priced_by_tokens():
    with pytest.raises(AssertionError):
        b3(lambda some: Demand((ceil_div(1301, 16), ceil_div(1301, 512))))


# ---- H1: one pool makes its peers pay


def h1(payer: int, taker: int) -> None:
    """The whole arena is cached pages of one pool; half of it is taken by another."""
    world = World(arena(full=3, sliding=2, state=1, slabs=4))
    per_slab = (3, 2, 1)
    owner = world.reserve(Demand(4 * per_slab[payer] if pool == payer else 0 for pool in range(3)))
    world.commit_all()
    world.cache(owner, payer, list(owner.handles[payer]))
    world.release(owner)
    assert world.reserve(Demand(2 * per_slab[taker] if pool == taker else 0 for pool in range(3))) is not None
    world.commit_all()
    assert world.evictions == 2 * per_slab[payer]
    world.check()


@pytest.mark.parametrize("payer", range(3))
@pytest.mark.parametrize("taker", range(3))
def test_h1_what_one_pool_has_cached_serves_any_other(payer, taker):
    """Both directions, three kinds."""
    h1(payer, taker)


def evicts_itself_only(taker: int) -> Callable[[moves.Pressure], Plan | Refusal]:
    """The wrong policy: whoever needs room may only give up its own cached pages."""

    def plan(pressure: moves.Pressure) -> Plan | Refusal:
        others = [0 if pool == taker else count for pool, count in enumerate(pressure.cached)]
        own = [count if pool == taker else 0 for pool, count in enumerate(pressure.cached)]
        fixed = tuple(map(sum, zip(pressure.fixed, others, strict=True)))
        return reclaim_plan(replace(pressure, fixed=fixed, cached=tuple(own)))

    return plan


@pytest.mark.parametrize("payer", range(3))
@pytest.mark.parametrize("taker", range(3))
def test_h1_bites_when_a_pool_may_evict_only_itself(payer, taker, monkeypatch):
    monkeypatch.setattr(moves, "reclaim_plan", evicts_itself_only(taker))
    if payer == taker:
        h1(payer, taker)
    else:
        with pytest.raises(InvariantError, match="L3"):
            h1(payer, taker)


# ---- H3: a hand-off and its states


def h3(states_to_land: int) -> None:
    """Three requests go from one arena to another that has room for three to their ends, and not for one state more.

    The other side reserves before anything is sent, what arrives lands in those very pages, and every decode goes on
    in them: no second state stands beside the one that landed.
    """
    prefill, decode = arena(full=4, state=1, slabs=6), arena(full=4, state=1, slabs=6)
    price = resident(prefill.layout, 40, 20)
    assert price == (4, 1)
    landing = price.plus(Demand((0, states_to_land - 1)))
    accepted = [decode.reserve(f"request-{number}", landing) for number in range(3)]
    assert all(isinstance(grant, Grant) for grant in accepted), "three were meant to fit to the page"
    for number, grant in enumerate(accepted):
        sent = prefill.reserve(f"request-{number}", resident(prefill.layout, 40, 1))
        assert isinstance(sent, Grant)
        done = prefill.commit([Order(sent, sent.demand)])
        pin = prefill.pin("transfer", done.handles[0])
        prefill.release(sent)
        assert prefill.figures().transfer_bytes > 0, "the sender's pages stay until they have been read"
        assert isinstance(grant, Grant)
        decode.commit([Order(grant, Demand((3, 1)))])  # what travels: 40 tokens in pages of 16, and the state
        prefill.unpin(pin)
    for grant in accepted:
        assert isinstance(grant, Grant)
        decode.commit([Order(grant, Demand((1, 0)))])  # positions 48 to 58: one page, no state
        assert tuple(grant.room) == (0, 0)
    assert decode.figures().free_bytes == 0
    assert prefill.figures().used_bytes == 0
    assert prefill.audit() == decode.audit() == []


def test_h3_a_hand_off_takes_the_states_that_were_reserved_and_none_beside():
    h3(states_to_land=1)


def test_h3_bites_a_hand_off_with_a_landing_state_beside_the_working_one():
    with pytest.raises(AssertionError, match="three were meant to fit"):
        h3(states_to_land=2)
