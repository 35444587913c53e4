"""What deciding costs, without a model: pages, plans of what to evict, matches, and one step of the scheduler.

    python benchmarks/control_plane.py [--rounds 20] [--check]

Shape: Gemma 3 27B in bf16 (10 full + 52 sliding layers, W = 1,024, 16-token pages). In every arena 1,000 requests run
and hold their pages; plans, matches and the acts called `cached` find 100,000 cached pages beside them. What was freed
there has left holes in hundreds of slabs, and who fills and leaves those has more to write down. The acts take turns,
round by round, so that a noisy second falls on all of them; each act's repeats within a round run on warm caches.
Garbage collection stays on; what was built beforehand is frozen and put on huge pages as the engine does it, so a
collection looks at the act's own garbage; they are counted.
Only the act itself is timed, not what puts the arena back. The last line is one JSON object; `--check` exits 1 when a
goal is missed. Run it on an idle machine.

    p99_reserve_us         price + reserve + commit of one page, for one more request, the two pools by turns: the 99th
                           percentile
    p99_reserve_each_us    the same with one page of each pool
    p99_loop_us            an empty loop that takes about as long: what the machine makes of anything so short
    p99_extend_us          the same for a running request that outgrows its grant
    growth_256_us          commit of one page of each pool for 256 requests that decode, in one step: the handles come
                           pool by pool, in the order of the requests
    growth_256_cut_us      the same, and each request's own handles cut out of them
    growth_256_cached_us   as growth_256_us, beside 100,000 cached pages
    prompt_12k_us          reserve + commit + release of all pages that a prompt of 12,000 tokens touches in one chunk
    prompt_12k_cached_us   the same beside 100,000 cached pages
    reclaim_plan_us        what to evict for 4 slabs: the tree's units, the dearer one of both kinds
    reclaim_plan_12k_us    what to evict for a prompt of 12,000 tokens: the same
    match_12k_us           key (the tokens packed) + match of a cached prompt of 12,000 tokens
    step_256_ms            plan + apply of a step in which 256 requests decode; a sixteenth of them takes a page

All are medians but for the four whose names begin with p99. What of such a percentile is the machine's, the loop shows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from statistics import median

from control_plane_acts import (
    ONE_PAGE,
    PROMPT_TOKENS,
    Act,
    CachedArena,
    Extend,
    Growth,
    Loop,
    LooseArena,
    Match,
    Prompt,
    Reclaim,
    Reserve,
    RunningArena,
    Step,
)

from halocline.engine.process import settle_memory
from halocline.huge_pages import keep_freed_memory, use_huge_pages
from halocline.memory.demand import Demand, step_price

PEER = {
    "extend of 512 tokens": "332 to 371",
    "its free": "189 to 258",
    "256 decodes": "220 to 259",
    "one plan of what to evict": "51 to 84",
}
"""What the shared-arena allocator of a leading engine takes, in us: figures told to us, measured on another machine."""


@dataclass
class Case:
    """One act with what it must show."""

    name: str
    act: Act
    repeats: int
    """Per round."""
    goal: float | None = None
    quantile: float = 0.5
    """Which quantile is held against the goal."""
    unit: float = 1e-6
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Do one round."""
        self.seconds += [self.act.once() for _ in range(self.repeats)]

    def at(self, quantile: float) -> float:
        """Return a quantile in the case's unit."""
        if quantile == 0.5:
            return median(self.seconds) / self.unit
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] / self.unit

    @property
    def figure(self) -> float:
        """Return what is reported and held against the goal."""
        return self.at(self.quantile)

    @property
    def is_missed(self) -> bool:
        """Whether there is a goal and the figure is not under it."""
        return self.goal is not None and self.figure >= self.goal

    def line(self) -> str:
        """Return one line of the table."""
        goal = "" if self.goal is None else f"   goal {self.goal:5.0f}: {'MISSED' if self.is_missed else 'met'}"
        return (
            f"{self.name:26} median {self.at(0.5):8.2f}   p99 {self.at(0.99):8.2f}   least {self.at(0):8.2f}"
            f"   of {len(self.seconds):6}{goal}"
        )


def cases() -> list[Case]:
    """Build the arenas, and name every act with its goal."""
    running, cached, loose = RunningArena(), CachedArena(), LooseArena()
    slabs = Demand((4 * cached.layout.pools[0].pages_per_slab, 0))
    prompt = step_price(cached.layout, 0, PROMPT_TOKENS)
    return [
        Case("p99_reserve_us", Reserve(running, [Demand((1, 0)), Demand((0, 1))]), 1000, 20, quantile=0.99),
        Case("p99_reserve_each_us", Reserve(running, [ONE_PAGE]), 500, quantile=0.99),
        Case("p99_loop_us", Loop(), 500, quantile=0.99),
        Case("p99_extend_us", Extend(running), 200, quantile=0.99),
        Case("growth_256_us", Growth(running), 25, 300),
        Case("growth_256_cut_us", Growth(running, is_cut=True), 25),
        Case("growth_256_cached_us", Growth(cached), 25),
        Case("prompt_12k_us", Prompt(running), 50, 150),
        Case("prompt_12k_cached_us", Prompt(cached), 50),
        Case("reclaim_plan_units_us", Reclaim(cached, slabs), 50, 50),
        Case("reclaim_plan_loose_us", Reclaim(loose, slabs), 50, 50),
        Case("reclaim_plan_12k_units_us", Reclaim(cached, prompt), 25, 300),
        Case("reclaim_plan_12k_loose_us", Reclaim(loose, prompt), 25, 300),
        Case("match_12k_us", Match(cached), 25, 200),
        Case("step_256_ms", Step(), 25, unit=1e-3),
    ]


def reported(done: list[Case]) -> dict[str, float]:
    """Return the figures by name; of both kinds of cached pages the dearer one under the name of both."""
    figures = {case.name: round(case.figure, 3 if case.unit == 1e-3 else 1) for case in done}
    for name in ("reclaim_plan", "reclaim_plan_12k"):
        figures[f"{name}_us"] = max(figures[f"{name}_units_us"], figures[f"{name}_loose_us"])
    return figures


def machine() -> str:
    """Return what this runs on: the processor's name, its cores, the interpreter."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    """Measure, print, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often the acts take turns")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    given = parser.parse_args()
    print(f"machine: {machine()}; load average {os.getloadavg()[0]:.1f}")
    keep_freed_memory()
    measured = cases()
    for case in measured:
        case.act.once()
    settle_memory()
    use_huge_pages()
    before = sum(of["collections"] for of in gc.get_stats())
    for _ in range(given.rounds):
        for case in measured:
            case.run()
    print(*(case.line() for case in measured), sep="\n")
    print(f"{sum(of['collections'] for of in gc.get_stats()) - before} garbage collections meanwhile")
    print("for comparison, a leading engine's shared-arena allocator, as told and measured on another machine (us):")
    print(*(f"  {what:26} {figure}" for what, figure in PEER.items()), sep="\n")
    missed = [case.name for case in measured if case.is_missed]
    print(json.dumps(reported(measured) | {"machine": machine()}))
    sys.exit(1 if given.check and missed else 0)


if __name__ == "__main__":
    main()
