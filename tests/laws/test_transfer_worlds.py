"""Two schedulers and a perfect exchange, whatever comes: L1 to L13 on both sides after every call, and L10 and L11.

What goes to and fro waits as long as chance wills, attempts are lost half way, clients leave, seniors push in, chunks
stay pinned to the end, pages come in part. In the end everybody has the oracle's tokens and nothing is held or pinned.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from halocline.cache.tier import Offer
from halocline.schedule.events import Accepted
from testing.schedule import FOUR_POOLS, FULL_AND_WINDOW, MIXED, THREE_POOLS, fewest_slabs, rules, stem, tiny_layout
from testing.transfers import BROKEN, Pair

LONGEST, MOST_TOKENS = 40, 12
EXPECTED_FAILURES = ("the link broke", "the other worker failed it", BROKEN)
SHAPES = (FULL_AND_WINDOW, THREE_POOLS, MIXED, FOUR_POOLS)


class Wild:
    """One pair of workers under random clients."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        pools = draw.choice(SHAPES)
        changes = {
            "prefix_cache": draw.random() < 0.6,
            "step_tokens": draw.choice((16, 24, 64)),
            "max_running_requests": draw.choice((3, 8)),
            "decode_reserve_tokens": draw.choice((0, 3, 512)),
            "admission": draw.choice((("expected", 0.9), ("guaranteed",))),
        }
        least = fewest_slabs(pools, LONGEST, MOST_TOKENS, **changes)
        here, there = (tiny_layout(pools, least + draw.choice((0, 1, 4, 12))) for _ in range(2))
        host_slabs = draw.choice((0, 4, 24)) if changes["prefix_cache"] else 0
        self.pair = Pair((here, rules(**changes)), (there, rules(**changes)), host_slabs=host_slabs)
        self.pair.took_at_once = draw.random() < 0.6
        self.pair.is_cut = draw.random() < 0.4
        if draw.random() < 0.5:
            for side in (self.pair.decode, self.pair.prefill):
                side.expect_outputs(MOST_TOKENS, 2)
        self.loaded_landings = 0
        if host_slabs:
            self._count_loads()
        self.stems = changes["prefix_cache"]
        self.names: list[str] = []
        self.count = 0

    def _count_loads(self) -> None:
        # Loads of landings, however they end.
        tier = self.pair.decode.scheduler._sharing.tier  # type: ignore[attr-defined]
        hold = tier.hold

        def counted(offer: Offer, *others: object) -> object:
            self.loaded_landings += offer.lands_at is not None
            return hold(offer, *others)

        tier.hold = counted

    def tokens(self) -> tuple[int, ...] | int:
        """Return a prompt, or the length of one."""
        draw = self.draw
        if self.stems and draw.random() < 0.6:
            return stem(4 * draw.randint(1, LONGEST // 4), draw.randint(0, 2), draw.choice((0, 8, 16)))
        return draw.randint(1, LONGEST)

    def happen(self) -> None:
        """Let one thing happen."""
        draw, pair = self.draw, self.pair
        kind, priority, most = draw.random(), draw.choice((0, 0, 1)), draw.randint(1, MOST_TOKENS)
        self.count += 1
        if kind < 0.25:
            pair.offers_at_once = draw.random() < 0.8
            name = f"t{self.count}"
            if isinstance(pair.submit(name, self.tokens(), most, priority), Accepted):
                self.names.append(name)
        elif kind < 0.35:
            side = draw.choice((pair.decode, pair.prefill))
            side.arrive(f"l{self.count}", self.tokens(), most, priority - draw.choice((0, 1)))
        elif kind < 0.42 and self.names:
            pair.abort(draw.choice(self.names))
        elif kind < 0.5 and pair.landings:
            pair.lose(draw.choice(sorted(pair.landings)), is_final=draw.random() < 0.2)
        elif kind < 0.6:
            pair.exchange()
        elif kind < 0.62:
            draw.choice((pair.decode, pair.prefill)).break_step(moves_are_done=draw.random() < 0.5)
        else:
            draw.choice((pair.decode, pair.prefill)).step()

    def settle(self) -> None:
        """Let everybody finish, and look at what came of it."""
        pair = self.pair
        pair.offers_at_once = True
        for name in self.names:
            if name not in pair.decode.ends:
                pair.offer(name)
        pair.run()
        for side in (pair.decode, pair.prefill):
            side.assert_true_tokens()
            assert side.is_empty, f"left behind: {side.arena.figures()}"
            assert not side.arena.pins.open
        missing = set(pair.decode.limits) - set(pair.decode.ends)
        assert not missing, f"not finished: {missing}"
        lost = {name for name, why in pair.decode.failed.items() if why not in EXPECTED_FAILURES}
        assert not lost, pair.decode.failed


def wild(seeds: range, events: int) -> Counter[str]:
    """Run one world per seed; return how often what happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = Wild(seed)
        for _ in range(events):
            world.happen()
        world.settle()
        pair = world.pair
        seen["landings"] += len(pair.accepted)
        seen["landings loaded in part"] += world.loaded_landings
        seen["hot landings"] += sum(ready.start_tokens > 0 for ready in pair.accepted)
        seen["retractions"] += pair.decode.retractions
        seen["further attempts"] += sum(pair.attempts.values())
        seen["plans of moves alone"] += pair.decode.bare_plans + pair.prefill.bare_plans
        seen["revoked"] += pair.revoked
    return seen


def test_two_workers_in_small_arenas_give_everybody_the_right_tokens() -> None:
    seen = wild(range(12), 50)
    assert seen["landings"] > 100
    for kind in ("hot landings", "landings loaded in part", "retractions", "further attempts", "plans of moves alone"):
        assert seen[kind] > 0, seen


@pytest.mark.laws
@pytest.mark.timeout(900)
def test_the_same_for_many_seeds() -> None:
    seen = wild(range(1000, 1080), 80)
    rare = ("landings loaded in part", "retractions", "further attempts", "plans of moves alone", "revoked")
    for kind in ("hot landings", *rare):
        assert seen[kind] > 5, seen
