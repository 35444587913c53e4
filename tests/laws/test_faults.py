"""100,000 faults injected into transfers; it prints what was explored, its digest and how long it took."""

from __future__ import annotations

import time

import pytest

from halocline.faults.worker import Makers
from halocline.faults.world import explore, explore_many
from testing.faults import WRONG, WRONG_WHEN_QUIET

pytestmark = pytest.mark.laws

PARTS = 4
FAULTS = 100_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_law_breaks_under_a_hundred_thousand_faults(part: int) -> None:
    began = time.process_time()
    tally = explore_many(1_000_000 * (1 + part), FAULTS // PARTS)
    print("\n".join(tally.lines()))
    print(f"{time.process_time() - began:.0f} s of processor time")
    assert not tally.broken, "\n".join(tally.lines())
    assert tally.fault_count >= FAULTS // PARTS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_exploration_finds_every_wrong_machine(wrong: type[Makers]) -> None:
    found = next((story for seed in range(1500) if (story := explore(seed, makers=wrong())).fault), None)
    assert found is not None, f"{wrong.__name__} was not found in 1,500 worlds"
    print(found.line())


@pytest.mark.parametrize("wrong", WRONG_WHEN_QUIET, ids=lambda wrong: wrong.__name__)
def test_worlds_without_faults_find_who_waits_in_a_circle(wrong: type[Makers]) -> None:
    stories = [explore(seed, most_faults=0, makers=wrong()) for seed in range(100)]
    found = [story for story in stories if story.fault]
    assert len(found) >= 5, f"{wrong.__name__} was found in {len(found)} of 100 worlds"
    assert all("is valid and cannot finish" in str(story.fault) for story in found)
    print(found[0].line())
