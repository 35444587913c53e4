"""Window pages that several requests lock, when one of them leaves at a bad moment."""

from __future__ import annotations

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant
from halocline.memory.retention import Full, Sliding
from testing.schedule import World, rules, stem, tiny_layout


def test_a_page_passed_beside_a_chunk_that_failed_needs_no_room_that_is_not_there() -> None:
    # The reader's window passes page 2, which the failing one locks, too: it would have to pay for it with the room
    # that its own chunk has filled; and nothing is left in the arena that could stand in for that.
    made = World(tiny_layout(((Full(), 4, 3), (Sliding(16), 4, 1)), 40), rules(prefix_cache=True))
    made.arrive("before", stem(25), 1)
    made.run()
    made.arrive("reader", stem(25), 20)
    made.run_until(lambda: made.scheduler._roster.live["reader"].computed == 26)
    made.arrive("failing", (*stem(24), *range(50, 70)), 4)
    plan = made.plan()
    assert plan is not None
    assert [(s.request_id, s.start, s.tokens) for s in plan.segments] == [("reader", 26, 1), ("failing", 24, 20)]
    foreign = made.arena.reserve("foreign", Demand((0, made.arena.most(1, Demand((0, 0))))))
    assert isinstance(foreign, Grant)
    made.backend.fails = {"failing"}
    made.apply(made.backend.run(plan))
    made.run_until(lambda: "reader" in made.ends)
    made.arena.release(foreign)
    assert list(made.failed) == ["failing"]
    assert made.outputs["reader"] == made.expected("reader")
