"""A whole run: a workload through the shipped scheduler, under a fake clock, on a device that is a formula."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from halocline.errors import ConfigError
from halocline.memory.facts import ModelLength
from halocline.memory.layout import ArenaLayout
from halocline.memory.sizing import Caps
from halocline.sim.backend import Stopwatch
from halocline.sim.driver import Driver, Mode
from halocline.sim.outcome import Outcome, PoolShape, Rejections, Tokens
from halocline.sim.record import Recorder
from halocline.sim.setup import Setup, World, build
from halocline.sim.workload import Workload

__all__ = ["Progress", "Setup", "simulate"]

PROGRESS_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; told now and then, at most some ten times a second, and at its end."""

    ended: int
    """Jobs that have ended, however."""
    jobs: int
    seconds: float
    """On the simulated clock."""
    wall_seconds: float
    steps: int
    running: int
    waiting: int


def simulate(
    setup: Setup,
    workload: Workload,
    *,
    saturated: bool = False,
    time_scale: float = 1.0,
    on_progress: Callable[[Progress], None] | None = None,
    window: tuple[int, int] | None = None,
    most_jobs: int | None = None,
    audit_every: int = 0,
) -> Outcome:
    """Let `workload` through and return what came of it.

    Arrivals are at the trace's times over `time_scale`; `saturated` lets all arrive at once, so that always somebody
    waits. `window` (first step, step after the last) asks for records of those steps. `audit_every` n recounts
    everything after each n-th step and at the end, and raises InvariantError with what it finds. Raises ConfigError
    when setup, model and arena do not go together.
    """
    if not time_scale > 0:
        raise ConfigError([f"time_scale is {time_scale}; it must be above 0"])
    began = time.perf_counter()
    work = workload if most_jobs is None else workload.first(most_jobs)
    mode = Mode(saturated, time_scale, audit_every, window or (0, 0))
    world = build(setup)
    stopwatch = Stopwatch(
        world.cost,
        instant_prefill=setup.instant_prefill,
        stride_bytes=[pool.stride_bytes for pool in world.arena.layout.pools],
        host_bytes_per_second=setup.host_copy_bytes_per_second,
    )
    record = Recorder(
        world.arena.layout,
        "saturated" if saturated else "open",
        setup.ttft_limit_seconds,
        setup.tpot_limit_seconds,
    )
    driver = Driver(setup, world, work, stopwatch, record, mode)
    told = began
    while driver.turn():
        if on_progress is not None and (now := time.perf_counter()) - told > PROGRESS_SECONDS:
            told = now
            on_progress(_progress(driver, world, work, now - began))
    if audit_every:
        driver.audit()
    wall_seconds = time.perf_counter() - began
    if on_progress is not None:
        on_progress(_progress(driver, world, work, wall_seconds))
    return _outcome(setup, world, work, driver, record, wall_seconds)


def _progress(driver: Driver, world: World, workload: Workload, wall_seconds: float) -> Progress:
    scheduler = world.scheduler
    return Progress(
        driver.ended,
        len(workload.jobs),
        driver.now,
        wall_seconds,
        scheduler.totals.steps,
        scheduler.running,
        driver.waiting,
    )


def _outcome(
    setup: Setup, world: World, workload: Workload, driver: Driver, record: Recorder, wall_seconds: float
) -> Outcome:
    layout = world.arena.layout
    figures = world.scheduler.figures()
    totals, cache = figures.totals, figures.cache
    hits, looked_up = (cache.hit_tokens, cache.looked_up_tokens) if cache is not None else (0, 0)
    evicted = cache.evicted_pages if cache is not None else (0,) * len(layout.pools)
    ttft, tpot, e2e = record.latencies()
    return Outcome(
        policy=setup.policy,
        model=setup.shape.name,
        kv_bytes=setup.kv_bytes,
        workload=workload.name,
        device=setup.device.name,
        loop=record.loop,
        seconds=record.seconds,
        wall_seconds=wall_seconds,
        steps=totals.steps,
        digest=driver.digest.hex(),
        middle_seconds=record.middle,
        requests=record.requests(driver.arrived),
        concurrency=record.concurrency(),
        goodput=record.goodput(driver.arrived),
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        e2e_seconds=e2e,
        tokens=Tokens(
            driver.prompt_tokens, totals.output_tokens, totals.computed_tokens, hits, totals.recomputed_tokens
        ),
        hit_rate=hits / looked_up if looked_up else 0.0,
        retractions=totals.retractions,
        moves=totals.moves,
        moved_bytes=driver.moved_bytes,
        evicted_bytes=sum(pages * pool.stride_bytes for pages, pool in zip(evicted, layout.pools, strict=True)),
        arena=record.arena(),
        waiting_seconds=record.waiting_seconds(),
        series=record.series(),
        pools=_pools(layout, world.caps),
        window=tuple(driver.window),
        host=None if driver.host is None else driver.host.use(figures),
        rejections=_rejections(world.facts.max_model_len, driver.first_rejection),
    )


def _rejections(longest: ModelLength, first: str | None) -> Rejections | None:
    return None if first is None else Rejections(longest.tokens, longest.reason, first)


def _pools(layout: ArenaLayout, caps: Caps | None) -> tuple[PoolShape, ...]:
    return tuple(
        PoolShape(pool.name, pool.page_tokens, pool.page_bytes, pool.stride_bytes, pool.pages_per_slab, cap)
        for pool, cap in zip(layout.pools, caps or (None,) * len(layout.pools), strict=True)
    )
