"""Small random worlds: all laws hold in every one of them, and a program that breaks one is found out.

`halocline.sim.worlds` draws a world from a seed and checks it after every step. `make test` runs 50 of them, `make
laws` a thousand. That they bite is shown with wrong programs: each must break a law in one of the first 200 worlds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from halocline.memory.arena import Arena
from halocline.memory.grant import Grant, Handles
from halocline.schedule.events import Reason
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request
from halocline.sim.sketches import Sketch, draw
from halocline.sim.stories import Story
from halocline.sim.worlds import World, explore, main
from halocline.step import StepPlan, StepResult
from testing import wrong
from testing.policies import pricing

QUICK_SEEDS = 50
ALL_SEEDS = 1000
BLOCK = 50
BITING_SEEDS = 200


Note = Callable[[str, object], None]
"""pytest's `record_property`."""


def assert_laws_hold(seeds: Sequence[int]) -> list[Story]:
    stories = [explore(seed) for seed in seeds]
    broken = [story.line() for story in stories if story.fault is not None]
    assert not broken, "\n".join(broken)
    return stories


def test_all_laws_hold_in_small_worlds() -> None:
    stories = assert_laws_hold(range(QUICK_SEEDS))
    seen = {
        "finished": sum(story.finished for story in stories),
        "aborted": sum(story.aborted for story in stories),
        "retractions": sum(story.retractions for story in stories),
        "moves": sum(story.moves for story in stories),
        "cached": sum(story.cached_tokens for story in stories),
    }
    seen["failed"] = sum(story.failed for story in stories)
    seen["leaps"] = sum(story.leaps for story in stories)
    assert min(seen.values()) >= 5, f"these worlds show too little: {seen}"


@pytest.mark.laws
@pytest.mark.parametrize("first", range(QUICK_SEEDS, ALL_SEEDS, BLOCK))
def test_all_laws_hold_in_many_small_worlds(first: int, record_property: Note) -> None:
    stories = assert_laws_hold(range(first, first + BLOCK))
    steps = sum(story.steps for story in stories)
    retractions, moves = (sum(getattr(story, what) for story in stories) for what in ("retractions", "moves"))
    record_property("explored", f"{len(stories)} worlds, {steps} steps, {retractions} retractions, {moves} moves")


# ---- the same seed, the same world


def digests(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "halocline.sim.worlds", "--seed", "20", "--count", "3"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_l12_a_seed_has_one_digest_whatever_the_hash_seed() -> None:
    first, second = digests("1"), digests("77")
    assert first == second
    assert first.count("digest") == 3
    assert len({line.split("digest ")[1] for line in first.splitlines() if "digest" in line}) == 3


def test_a_world_is_shown_again_by_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    story = explore(17)
    assert main(["--seed", "17", "--trace"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("arena: ")
    assert shown[-1] == story.line()
    assert len(shown) > story.steps
    assert main(["--seed", "17", "--steps", "3"]) == 0
    assert " 3 steps" in capsys.readouterr().out


def test_a_broken_world_prints_the_line_that_shows_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "_check", lambda world: 1 / 0 if world.steps == 2 else None)
    assert main(["--seed", "17", "--count", "2"]) == 1
    out = capsys.readouterr().out
    assert "seed 17: step 2: ZeroDivisionError" in out
    assert "python -m halocline.sim.worlds --seed 17 --trace" in out
    assert out.splitlines()[-1] == "2 worlds, 2 broke a law"


def test_sketches_draw_every_kind_of_world() -> None:
    sketches = [draw(seed) for seed in range(BITING_SEEDS)]
    kinds: dict[str, Callable[[Sketch], object]] = {
        "one pool": lambda s: len(s.layout.pools) == 1,
        "three pools": lambda s: len(s.layout.pools) == 3,
        "full": lambda s: any(pool.name == "full" for pool in s.layout.pools),
        "no full": lambda s: all(pool.name != "full" for pool in s.layout.pools),
        "sliding": lambda s: any(pool.name.startswith("sliding") for pool in s.layout.pools),
        "chunked": lambda s: any(pool.name.startswith("chunked") for pool in s.layout.pools),
        "state": lambda s: any(pool.name == "state" for pool in s.layout.pools),
        "pages of different lengths": lambda s: len({pool.page_tokens for pool in s.layout.pools}) == 3,
        "split": lambda s: s.caps is not None,
        "shared": lambda s: s.caps is None,
        "guaranteed": lambda s: s.rules.is_guaranteed,
        "little granted": lambda s: s.classes_seen,
        "cache": lambda s: s.rules.prefix_cache,
        "no cache": lambda s: not s.rules.prefix_cache,
        "delay": lambda s: s.rules.prefill_delay_seconds > 0,
        "leap": lambda s: s.leap_tokens > 1,
        "lease": lambda s: s.leases,
        "break": lambda s: s.breaks,
        "abort": lambda s: any(client.abort_seconds is not None for client in s.clients),
        "turns": lambda s: any(client.turns for client in s.clients),
        "priorities": lambda s: len({client.priority for client in s.clients}) > 1,
        "too long": lambda s: any(
            len(client.prompt) + (client.params.max_tokens or 1) > s.longest for client in s.clients
        ),
    }
    for name, of in kinds.items():
        count = sum(bool(of(sketch)) for sketch in sketches)
        assert count >= 8, f"only {count} of {BITING_SEEDS} worlds have: {name}"


# ---- wrong programs


def exchanges_two_pages(made: World) -> None:
    """A page table of the plan names two pages in the wrong order."""
    run = made.backend.run

    def wrongly(plan: StepPlan) -> StepResult:
        for table in plan.tables:
            for begin, end in zip(table.page_starts, table.page_starts[1:], strict=False):
                if end - begin >= 2:
                    table.pages[begin : begin + 2] = table.pages[begin : begin + 2][::-1].copy()
        return run(plan)

    made.backend.run = wrongly  # type: ignore[method-assign]


def forgets_moves(made: World) -> None:
    """Page numbers are remembered although the pages have moved."""
    keeper = made.scheduler._keeper

    def remember(_holdings: object) -> None:
        keeper._moves_seen = keeper._arena.moves_planned

    keeper.look_up = remember  # type: ignore[method-assign]


def loses_moves(made: World) -> None:
    """The moves of a plan are not carried out."""
    run = made.backend.run

    def wrongly(plan: StepPlan) -> StepResult:
        object.__setattr__(plan, "moves", ())
        return run(plan)

    made.backend.run = wrongly  # type: ignore[method-assign]


def frees_windows_early(made: World) -> None:
    """A window gives its oldest page up one position too early."""
    keeper = made.scheduler._keeper
    slide = keeper.slide

    def early(holding: Holding, computed: int) -> None:
        slide(holding, computed + 1)

    keeper.slide = early  # type: ignore[method-assign]


def renews_seniority(made: World) -> None:
    """A retracted request comes back as the youngest."""
    roster = made.scheduler._roster
    retract = roster.retract
    line = roster.waiting

    def renewed(request: Request, *, keep: bool = True) -> None:
        retract(request, keep=keep)
        line.remove(request)
        request.key = (request.key[0], 10**6 + roster.totals.retractions)
        line.add(request)

    roster.retract = renewed  # type: ignore[method-assign]


def never_retracts(made: World) -> None:
    """Whoever is refused stands still until room comes."""
    growth = made.scheduler._growth
    growth._make_room = lambda request, holding, price, refusal: refusal  # type: ignore[method-assign]
    growth._give_way = lambda request, refusal: None  # type: ignore[method-assign]


def forgets_copies(made: World) -> None:
    """A state begins from whatever its page held, not from the checkpoint."""
    made.scheduler._sharing.copies = lambda chunks: ((), ())  # type: ignore[method-assign]


def writes_shared_pages(made: World) -> None:
    """Retracted requests' pages are given to the prefix cache although half of the last one is not computed."""
    sharing = made.scheduler._sharing
    leave = sharing.leave

    def ahead(request: Request, holding: Holding, *, keep: bool = True) -> None:
        request.computed = min(request.computed + 2, len(request.history))
        leave(request, holding, keep=keep)

    sharing.leave = ahead  # type: ignore[method-assign]


class EvictsLocked(Arena):
    """A locked page can be evicted: locking tells nobody."""

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: object) -> object:
        granted = super().lock(owner, handles, demand)  # type: ignore[arg-type]
        if isinstance(granted, Grant):
            self.unlock(handles)
        return granted


def waits_without_a_reason(made: World) -> None:
    """Nobody can be told why a request does not run."""
    made.scheduler.reasons = dict[str, Reason]  # type: ignore[method-assign]


def leaks_a_grant(made: World) -> None:
    """Every fourth request that leaves leaves a page behind."""
    keeper, count = made.scheduler._keeper, [0]
    close = keeper.close

    def forgetful(holding: Holding) -> None:
        count[0] += 1
        if count[0] % 4:
            close(holding)

    keeper.close = forgetful  # type: ignore[method-assign]


Spoil = Callable[[World], object]
WRONG: dict[str, tuple[Spoil | None, type[Arena], Callable[[], AbstractContextManager[None]]]] = {
    "exchanges two pages": (exchanges_two_pages, Arena, nullcontext),
    "forgets moves": (forgets_moves, Arena, nullcontext),
    "loses moves": (loses_moves, Arena, nullcontext),
    "frees windows early": (frees_windows_early, Arena, nullcontext),
    "renews seniority": (renews_seniority, Arena, nullcontext),
    "never retracts": (never_retracts, Arena, nullcontext),
    "forgets copies": (forgets_copies, Arena, nullcontext),
    "writes shared pages": (writes_shared_pages, Arena, nullcontext),
    "waits without a reason": (waits_without_a_reason, Arena, nullcontext),
    "leaks a grant": (leaks_a_grant, Arena, nullcontext),
    "evicts locked": (None, EvictsLocked, nullcontext),
    "A1": (wrong.keeps_windows_while_prefilling, Arena, nullcontext),
    "H6": (wrong.keeps_windows_while_decoding, Arena, nullcontext),
    "A4": (wrong.takes_granted_room, Arena, nullcontext),
    "A5": (wrong.counts_chunks_when_planned, Arena, nullcontext),
    "A6": (None, Arena, lambda: pricing(wrong.price_of_the_prompt_only)),
    "A9": (None, Arena, lambda: pricing(wrong.price_of_one_window_page)),
    "H2": (None, Arena, lambda: pricing(wrong.price_rounded_twice)),
}
QUICK_WRONG = ("exchanges two pages", "waits without a reason", "leaks a grant", "evicts locked", "A4", "A6")


def assert_found_out(name: str, record: Note) -> None:
    spoil, make_arena, spoiled = WRONG[name]
    with spoiled():
        for seed in range(BITING_SEEDS):
            story = explore(seed, make_arena=make_arena, spoil=spoil)
            if story.fault is not None:
                record("found", story.line())
                return
    raise AssertionError(f"{BITING_SEEDS} worlds let it pass")


@pytest.mark.parametrize("name", QUICK_WRONG)
def test_a_wrong_program_breaks_a_law_in_a_small_world(name: str, record_property: Note) -> None:
    assert_found_out(name, record_property)


@pytest.mark.laws
@pytest.mark.parametrize("name", [name for name in WRONG if name not in QUICK_WRONG])
def test_a_wrong_program_breaks_a_law_in_some_small_world(name: str, record_property: Note) -> None:
    assert_found_out(name, record_property)
