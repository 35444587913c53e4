"""Workers that compute prompts for each other never wait in a circle: every interleaving of small worlds is tried, and
of a ring of three workers, which has too many, some hundreds.

In each of them the arenas, or the slots, hold one long request at a time, so that a landing keeps a prompt out that
another worker waits for. With the rule of `halocline.schedule.courtesy` every run ends with all answers; without it a
circle is found, and a rule without an order goes on for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full
from halocline.schedule.scheduler import Rules
from testing.circles import Asked, Found, explore, town, wander
from testing.schedule import FULL_AND_WINDOW, rules, tiny_layout

FIVE_PAGES = tiny_layout(((Full(), 4, 1),), 5)
ROOMY = tiny_layout(((Full(), 4, 1),), 12)
WINDOWED = tiny_layout(FULL_AND_WINDOW, 7)
RULES = rules(step_tokens=16, max_running_requests=4, decode_reserve_tokens=0, max_model_len=32)
ONE_SLOT = rules(step_tokens=16, max_running_requests=1, decode_reserve_tokens=0, max_model_len=32)

A, B = Asked("a", 0, 1, 12, 1), Asked("b", 1, 0, 12, 1)
Workers = Sequence[tuple[ArenaLayout, Rules]]
SMALL: dict[str, tuple[Workers, tuple[Asked, ...]]] = {
    "memory": ([(FIVE_PAGES, RULES)] * 2, (A, B)),
    "slots": ([(ROOMY, ONE_SLOT)] * 2, (A, B)),
}
LARGE: dict[str, tuple[Workers, tuple[Asked, ...]]] = {
    "memory here and slots there": ([(FIVE_PAGES, RULES), (ROOMY, ONE_SLOT)], (A, B)),
    "a request of its own besides": ([(FIVE_PAGES, RULES)] * 2, (A, B, Asked("own", 0, 0, 8, 2))),
    "two asked of one": ([(FIVE_PAGES, RULES)] * 2, (A, B, Asked("c", 0, 1, 8, 1))),
    "two asked of the other": ([(FIVE_PAGES, RULES)] * 2, (A, B, Asked("c", 1, 0, 8, 1))),
    "one of them more senior": ([(FIVE_PAGES, RULES)] * 2, (A, B, Asked("c", 0, 1, 12, 1, -1))),
    "several pools": ([(WINDOWED, RULES)] * 2, (Asked("a", 0, 1, 16, 3), Asked("b", 1, 0, 16, 3))),
    "outgrown grants": (
        [(FIVE_PAGES, rules(step_tokens=16, max_running_requests=4, decode_reserve_tokens=0, max_model_len=32))] * 2,
        (Asked("a", 0, 1, 7, 6), Asked("b", 1, 0, 12, 2), Asked("c", 0, 1, 4, 6)),
    ),
}
RING: tuple[Workers, tuple[Asked, ...]] = (
    [(FIVE_PAGES, RULES)] * 3,
    (Asked("a", 0, 1, 12, 1), Asked("b", 1, 2, 12, 1), Asked("c", 2, 0, 12, 1)),
)


def found(name: str, rule: str = "order", most_worlds: int = 100_000) -> Found:
    workers, clients = (SMALL | LARGE | {"ring": RING})[name]
    return explore(town(workers, clients, rule), most_worlds)


@pytest.mark.parametrize("name", SMALL)
def test_every_run_of_a_small_world_ends_with_all_answers(name: str) -> None:
    ends = found(name, most_worlds=1000)
    assert ends.fault == ""
    assert ends.worlds > 40, "nothing was tried"
    assert ends.revoked > 0, "no landing gave way: the world has too much room"


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(name, marks=pytest.mark.laws) for name in ("memory here and slots there", "ring"))]
)
def test_without_the_rule_there_is_a_circle(name: str) -> None:
    assert found(name, "nobody").fault.startswith("a circle after")


def test_a_rule_without_an_order_goes_on_for_ever() -> None:
    assert found("memory", "everybody", most_worlds=300).fault.startswith("no end after 300 worlds")


@pytest.mark.laws
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGE)
def test_every_run_of_a_larger_world_ends_with_all_answers(name: str) -> None:
    ends = found(name)
    print(f"{name}: {ends.worlds} worlds, at most {ends.revoked} landings gave way in one run")
    assert ends.fault == ""


@pytest.mark.laws
def test_a_ring_of_three_workers_ends_with_all_answers_in_whatever_order_things_happen() -> None:
    workers, clients = RING
    assert {wander(town(workers, clients), Random(seed)) for seed in range(400)} == {""}
    assert any(wander(town(workers, clients, "nobody"), Random(seed)).startswith("a circle") for seed in range(20))
