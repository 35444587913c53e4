"""The digest of decisions: every part of a plan is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from halocline.params import SamplingParams
from halocline.sim.digest import Digest
from halocline.sim.outline import Outline
from halocline.step import Move, Segment

PARAMS = SamplingParams()
PLAN = Outline(
    step=5,
    moves=(Move(0, 3, 4),),
    segments=tuple(Segment(name, 8, 1, True, PARAMS, 0, (), 8, False) for name in ("a", "b")),
    token_ids=np.zeros(0, np.int64),
    positions=np.zeros(0, np.int64),
    query_starts=np.array([0, 1, 2], dtype=np.int32),
    tables=(),
    decodes=2,
    decode_tokens=1,
    starts=np.array([8, 9]),
    ends=(np.array([7, 9], dtype=np.int32),),
)


def digest_of(plan: Outline, pages: tuple[int, ...] = (4, 5, 6), how: str = "finished") -> str:
    digest = Digest()
    digest.step(plan, pages)
    digest.end("a", how)
    return digest.hex()


CHANGES: dict[str, Callable[[Outline], Outline]] = {
    "step": lambda plan: replace(plan, step=6),
    "moves": lambda plan: replace(plan, moves=()),
    "a move's target": lambda plan: replace(plan, moves=(Move(0, 3, 5),)),
    "who": lambda plan: replace(
        plan, segments=(plan.segments[0], msgspec.structs.replace(plan.segments[1], request_id="c"))
    ),
    "order": lambda plan: replace(plan, segments=plan.segments[::-1]),
    "where": lambda plan: replace(plan, starts=np.array([8, 10])),
    "how far": lambda plan: replace(plan, query_starts=np.array([0, 1, 3], dtype=np.int32)),
    "page": lambda plan: replace(plan, ends=(np.array([8, 9], dtype=np.int32),)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_plan_that_differs_in_one_thing_has_another_digest(what: str) -> None:
    assert digest_of(CHANGES[what](PLAN)) != digest_of(PLAN)


def test_counts_of_pages_and_ends_are_in_it_and_equal_runs_are_equal() -> None:
    assert digest_of(PLAN) == digest_of(replace(PLAN))
    assert digest_of(PLAN, (4, 5, 7)) != digest_of(PLAN)
    assert digest_of(PLAN, how="failed") != digest_of(PLAN)


def test_the_same_requests_again_are_taken_in_again_by_their_positions() -> None:
    once, twice = Digest(), Digest()
    once.step(PLAN, (1,))
    twice.step(PLAN, (1,))
    twice.step(PLAN, (1,))
    assert once.hex() != twice.hex()
