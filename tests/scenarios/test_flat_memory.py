"""I2 of the scenarios: a scheduler that has served a million requests is no larger than one that has served some.

What is bounded is filled up first: 1,024 output lengths of a class, the names of owners, the digests of prefixes that
were evicted. From then on neither the process nor any of our own objects may grow with the number of requests.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable

import psutil
import pytest

from halocline.cache import ghosts
from halocline.memory.retention import Full, Sliding
from halocline.params import SamplingParams
from halocline.schedule.admission import OBSERVED_REQUESTS
from halocline.schedule.events import Arrive
from halocline.step import Sampled, StepPlan, StepResult
from testing.schedule import PoolSpec, World, greedy, rules, tiny_layout

POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))
SLABS = 240
AT_ONCE = 24
MIB = 1 << 20
CACHE = pytest.mark.parametrize("prefix_cache", [False, True], ids=["cache off", "cache on"])


class NullBackend:
    """Answers with token 1: the memory of the oracle is not what is measured."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(Sampled(s.request_id, 1) for s in plan.segments if s.samples))


class Server:
    """A world that serves requests in waves; with the cache on, some begin alike and most drive others out."""

    def __init__(self, prefix_cache: bool) -> None:
        changed = rules(prefix_cache=prefix_cache, max_running_requests=AT_ONCE, step_tokens=512)
        self.made = World(tiny_layout(POOLS, SLABS), changed, check=False)
        for _ in range(OBSERVED_REQUESTS // 32):
            self.made.expect_outputs(2, 2)
        self.backend = NullBackend()
        self.params: SamplingParams = greedy(2)
        self.served = 0

    def serve(self, requests: int) -> None:
        """Serve so many requests, each to its end."""
        scheduler, target = self.made.scheduler, self.served + requests
        while self.served < target:
            for number in range(self.served, min(target, self.served + AT_ONCE)):
                head = (number // 7 % 97, number // 679 % 97, 1, number // 65863 % 97)  # seven in a row begin alike
                scheduler.handle(Arrive(f"r{number}", head + (number % 97,) * (1 + number % 6), self.params, 0))
                self.served += 1
            while (plan := scheduler.plan(0.0)) is not None:
                scheduler.apply(self.backend.run(plan))
            assert not scheduler.has_work

    def check(self) -> None:
        """Everything is as it should be, and what is kept is bounded by the arena."""
        assert self.made.scheduler.audit() == []
        assert len(self.made.arena.owners.names) < 3000
        figures = self.made.scheduler.figures()
        assert figures.totals.finished == self.served
        if figures.cache is not None:
            pages = SLABS  # of either pool
            assert 0 < figures.cache.nodes <= pages, f"{figures.cache.nodes} nodes in an arena of {pages} pages"
            assert figures.cache.hit_tokens > 0
            assert sum(figures.cache.evicted_pages) > 0, "the arena was meant to be too small to keep all"


def ours() -> Counter[str]:
    """Count our own objects, and the containers that could hold them or their tokens, by kind."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__name__ for kind in kinds if str(kind.__module__).startswith("halocline") or kind in (list, deque)
    )


def check_flat(prefix_cache: bool, before: int, after: int, patch: pytest.MonkeyPatch) -> str:
    """Serve, serve more, and compare; return what was measured."""
    patch.setattr(ghosts, "REMEMBERED", 400)  # full after `before` requests
    server = Server(prefix_cache)
    server.serve(before)
    server.check()
    process, first = psutil.Process(), ours()
    size = process.memory_info().rss
    server.serve(after)
    server.check()
    grown = process.memory_info().rss - size
    left = ours() - first
    assert left.total() < 100, f"{after} further requests left {left} behind"
    assert grown < 8 * MIB, f"{after} further requests left {grown / MIB:.1f} MiB behind"
    return f"{server.served} requests, {grown} bytes of resident memory more than after the first {before}"


@CACHE
def test_i2_no_request_leaves_anything_behind(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_flat(prefix_cache, 1200, 1500, monkeypatch)


@pytest.mark.laws
@pytest.mark.timeout(3600)
@CACHE
def test_i2_memory_stays_flat_over_a_million_requests(
    prefix_cache: bool, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """With the cache on sixty thousand, and each of those leaves something behind in the tree for a while."""
    after = 40_000 if prefix_cache else 980_000
    record_property("explored", check_flat(prefix_cache, 20_000, after, monkeypatch))
