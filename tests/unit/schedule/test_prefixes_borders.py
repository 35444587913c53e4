"""What the tree holds for a request, to the page: who pays for a window that two of them lock, and who may have to."""

from __future__ import annotations

from halocline.memory.demand import resident
from halocline.schedule.holding import Holding
from testing.schedule import FULL_AND_WINDOW, World, stem, world

NEW_TOKENS = 5


def two_on_one_window() -> tuple[World, list[Holding]]:
    """Plan a step in which two requests resume at 16: full pages 0 to 3 and window pages 2 and 3 are the tree's."""
    made = world(FULL_AND_WINDOW, 40, prefix_cache=True)
    made.arrive("first", stem(22), 2)
    made.run()
    for branch in (1, 2):
        made.arrive(f"r{branch}", stem(22, branch=branch, at=17), NEW_TOKENS)
    assert made.plan() is not None
    holdings = [request.holding for request in made.scheduler._roster.prefilling]
    assert None not in holdings
    assert len(holdings) == 2
    return made, holdings


def test_a_grant_and_what_the_tree_covers_are_the_price() -> None:
    made, holdings = two_on_one_window()
    price = resident(made.layout, 22, NEW_TOKENS, 16)
    covered = [made.scheduler._sharing.covered(holding) for holding in holdings]
    assert covered == [(4, 2), (4, 0)], "the window is charged to the first of them alone"
    assert [holding.grant.demand.plus(part) for holding, part in zip(holdings, covered, strict=True)] == [price, price]


def test_who_locks_what_another_one_pays_for_keeps_the_room_to_pay() -> None:
    made, holdings = two_on_one_window()
    assert [made.scheduler._sharing.reserved(holding) for holding in holdings] == [(0, 0), (0, 2)]


def test_what_a_request_owes_is_not_covered() -> None:
    made, (holding, _) = two_on_one_window()
    assert holding.lock is not None
    holding.lock.owed[1] += 1
    assert made.scheduler._sharing.covered(holding) == (4, 1)


def test_what_a_failed_request_has_not_given_the_tree_yet_is_not_kept() -> None:
    """At 14 computed tokens the tree has the prompt's 8: it would get four more if the request left in peace."""
    made = world(FULL_AND_WINDOW, 40, prefix_cache=True)
    made.arrive("doomed", stem(8), 20)
    request = made.scheduler._roster.live["doomed"]
    made.run_until(lambda: request.computed == 14)
    assert made.plan() is not None
    made.note_updates(made.scheduler.fail_step("the device is gone"))
    assert made.failed == {"doomed": "the device is gone"}
    made.arrive("next", tuple(request.history), 2)
    made.run()
    assert made.cached_tokens["next"] == 8
