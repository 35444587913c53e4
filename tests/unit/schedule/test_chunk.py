"""The step's room: chunks are cut to it, the floor serves the most senior only, granted pages are never touched."""

from __future__ import annotations

import pytest

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.grant import Grant, Order, Refusal
from halocline.params import SamplingParams
from halocline.schedule.chunk import StepRoom
from halocline.schedule.events import Arrive
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request
from testing.schedule import FULL_AND_WINDOW, tiny_layout


class Bench:
    """An arena with a floor, a keeper, and requests that are about to prefill."""

    def __init__(self, slabs: int) -> None:
        self.arena = Arena(tiny_layout(FULL_AND_WINDOW, slabs))
        floor = self.arena.reserve("floor", floor_demand(self.arena.layout))
        assert isinstance(floor, Grant)
        self.floor = floor
        self.keeper = Keeper(self.arena)

    def room(self, tokens: int = 64) -> StepRoom:
        return StepRoom(self.arena, self.floor, tokens)

    def request(self, name: str, length: int) -> tuple[Request, Holding]:
        request = Request(Arrive(name, (1,) * length, SamplingParams(), 0), 0, 1, frozenset())
        holding = self.keeper.open(name, resident(self.arena.layout, length, 1))
        assert isinstance(holding, Holding), holding
        request.holding = holding
        return request, holding

    def commit(self, room: StepRoom) -> None:
        """Commit all chunks, as the scheduler does."""
        orders: list[Order] = []
        takers: list[Holding] = []
        for chunk in room.chunks:
            assert chunk.request.holding is not None
            asked = room.orders(chunk, self.keeper.wanted(chunk.request.holding, chunk.start, chunk.end))
            orders += asked
            takers += [chunk.request.holding] * len(asked)
        self.keeper.fill(takers, self.arena.commit(orders).handles)


# A prompt of 32 tokens is granted 8 full pages (3 slabs) and 2 window pages; in one chunk it holds 8 window pages.


@pytest.mark.parametrize(("slabs", "tokens"), [(7, 16), (8, 20), (9, 24), (10, 28), (11, 32), (12, 32)])
def test_a_chunk_is_cut_to_the_room(slabs: int, tokens: int) -> None:
    """With s slabs, of which 3 + 2 are granted and 1 is the floor: a chunk may hold 3 + (s - 6) window pages."""
    bench = Bench(slabs)
    request, holding = bench.request("a", 32)
    room = bench.room()
    assert room.fit(0, 32, holding.grant.demand) == tokens
    assert room.take(request, 0, tokens, holding.grant.demand) is None
    bench.commit(room)
    assert holding.pages == (tokens // 4, tokens // 4)
    assert bench.arena.audit() == []


def test_asking_changes_nothing() -> None:
    bench = Bench(9)
    _, holding = bench.request("a", 32)
    before = (bench.arena.figures(), list(bench.arena.budget.promised))
    room = bench.room()
    for _ in range(3):
        room.fit(0, 32, holding.grant.demand)
    assert (bench.arena.figures(), list(bench.arena.budget.promised)) == before
    assert room.chunks == []


def test_the_floor_is_for_the_most_senior_prefill_alone() -> None:
    bench = Bench(11)  # 16 full pages in 6 slabs, 2 x 2 window pages, 1 for the floor, nothing else
    first, first_holding = bench.request("a", 32)
    _, second_holding = bench.request("b", 32)
    room = bench.room()
    assert room.fit(0, 32, first_holding.grant.demand) == 12  # 2 granted + 1 of the floor
    assert room.take(first, 0, 12, first_holding.grant.demand) is None
    assert room.fit(0, 32, second_holding.grant.demand) == 8  # what it was granted, and no more


def test_the_floor_is_not_passed_down_when_the_most_senior_cannot_use_it() -> None:
    bench = Bench(6)
    _, holding = bench.request("b", 32)
    room = bench.room()
    room.pass_floor_by()
    assert room.fit(0, 32, holding.grant.demand) == 8


def test_the_step_grant_adds_up_over_all_chunks_and_goes_back() -> None:
    bench = Bench(11 + 5)
    pairs = [bench.request(name, 32) for name in "ab"]
    room = bench.room()
    for request, holding in pairs:
        assert room.take(request, 0, room.fit(0, 32, holding.grant.demand), holding.grant.demand) is None
    assert [chunk.tokens for chunk in room.chunks] == [32, 8]  # 2 granted + 1 floor + 5 free, then 2 granted
    assert room.held_by_chunks == (0, 5)
    bench.commit(room)
    for chunk, (_, holding) in zip(room.chunks, pairs, strict=True):
        bench.keeper.slide(holding, chunk.end)
    room.close()
    assert bench.arena.fits(Demand((0, 5)))
    assert not any(bench.floor.lent)
    assert bench.arena.audit() == []


def test_room_cannot_be_closed_while_pages_are_borrowed() -> None:
    bench = Bench(20)
    request, holding = bench.request("a", 32)
    room = bench.room()
    room.take(request, 0, 32, holding.grant.demand)
    bench.commit(room)
    with pytest.raises(AssertionError, match="still lends"):
        room.close()


def test_tokens_are_limited_to_what_the_step_has_left() -> None:
    bench = Bench(60)
    request, holding = bench.request("a", 32)
    room = bench.room(tokens=22)
    assert room.fit(0, 32, holding.grant.demand) == 20  # whole granules
    room.take(request, 0, 20, holding.grant.demand)
    assert room.tokens_left == 2
    assert room.fit(20, 32, holding.grant.demand) == 0


def test_a_prompts_last_chunk_need_not_be_whole() -> None:
    bench = Bench(60)
    _, holding = bench.request("a", 30)
    assert bench.room().fit(24, 30, holding.grant.demand) == 6


def test_a_refused_step_grant_is_reported_and_enters_no_chunk() -> None:
    bench = Bench(9)
    request, holding = bench.request("a", 32)
    room = bench.room()
    refusal = room.take(request, 0, 32, holding.grant.demand)
    assert isinstance(refusal, Refusal)
    assert room.chunks == []
    room.close()
