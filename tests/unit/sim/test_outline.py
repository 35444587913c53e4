"""What a replay reads of a step is what the plan for a model says: no decision depends on the packer."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.memory.arena import Arena
from halocline.schedule.events import Arrive
from halocline.schedule.scheduler import Scheduler
from halocline.sim.outline import Outline, Sketcher
from halocline.step import Sampled, StepPlan, StepResult
from testing.schedule import FOUR_POOLS, FULL_AND_WINDOW, PoolSpec, greedy, rules, stem, tiny_layout

LEAP = 4


def pair(pools: tuple[PoolSpec, ...]) -> tuple[Scheduler, Scheduler]:
    """Return two schedulers that differ in their packers only, with the same requests: some give way to others."""
    layout, made = tiny_layout(pools, 26), rules(prefix_cache=True, lookahead_tokens=LEAP - 1, step_tokens=32)
    for_model, for_replay = Scheduler(Arena(layout), made), Scheduler(Arena(layout), made, packer=Sketcher())
    for scheduler in (for_model, for_replay):
        for number in range(24):
            text = stem(9 + number * 5 % 23, number, 4 + number % 9)
            scheduler.handle(Arrive(str(number), text, greedy(3 + number * 7 % 30), 0))
    return for_model, for_replay


def answer(plan: StepPlan) -> StepResult:
    sampled = []
    for segment in plan.segments:
        if segment.samples:
            further = (5,) * (segment.tokens - 1) if segment.is_leap else ()
            sampled.append(Sampled(segment.request_id, 5, None, further))
    return StepResult(plan.step, tuple(sampled))


@pytest.mark.parametrize("pools", [FULL_AND_WINDOW, FOUR_POOLS], ids=["two-pools", "four-pools"])
def test_an_outline_says_of_every_step_what_the_tables_say(pools: tuple[PoolSpec, ...]) -> None:
    for_model, for_replay = pair(pools)
    moves = leaps = mixed = 0
    while (plan := for_model.plan(0.0, LEAP)) is not None:
        outline = for_replay.plan(0.0, LEAP)
        assert isinstance(outline, Outline)
        assert outline.segments == plan.segments
        assert (outline.moves, outline.copies, outline.saves) == (plan.moves, plan.copies, plan.saves)
        assert outline.query_starts.tolist() == plan.query_starts.tolist()
        assert outline.starts.tolist() == plan.positions[plan.query_starts[:-1]].tolist()
        for ends, table in zip(outline.ends, plan.tables, strict=True):
            assert ends.dtype == np.int32
            assert ends.tolist() == table.pages[table.page_starts[1:] - 1].tolist()
        assert [segment.tokens for segment in outline.segments[: outline.decodes]] == (
            [outline.decode_tokens] * outline.decodes
        )
        moves += len(plan.moves)
        leaps += outline.decode_tokens > 1
        mixed += 0 < outline.decodes < len(outline.segments)
        assert for_replay.apply(answer(outline)) == for_model.apply(answer(plan))
        assert for_replay.audit() == []
    assert for_replay.plan(0.0, LEAP) is None
    assert for_replay.figures() == for_model.figures()
    assert min(moves, leaps, mixed) > 0, f"{moves} moves, {leaps} leaps, {mixed} steps with decodes and chunks"


def test_a_prompt_of_one_token_is_no_decode_though_it_samples_like_one() -> None:
    layout = tiny_layout(FULL_AND_WINDOW, 40)
    scheduler = Scheduler(Arena(layout), rules(step_tokens=32), packer=Sketcher())
    scheduler.handle(Arrive("a", stem(1), greedy(4), 0))
    first = scheduler.plan(0.0)
    assert isinstance(first, Outline)
    assert (first.decodes, first.starts.tolist(), first.query_starts.tolist()) == (0, [0], [0, 1])
    scheduler.apply(answer(first))
    second = scheduler.plan(0.0)
    assert isinstance(second, Outline)
    assert (second.decodes, second.starts.tolist()) == (1, [1])
