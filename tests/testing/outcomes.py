"""Outcomes of a replay, made up: for whatever only reads and shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halocline.sim.host_use import Copied, HostSeries, HostUse
from halocline.sim.outcome import (
    ArenaUse,
    Concurrency,
    Goodput,
    Latency,
    Outcome,
    PoolShape,
    RequestCounts,
    SegmentRecord,
    Series,
    StepRecord,
    Tokens,
)

GIB = 2**30
POINTS = 40


def latency(seconds: float) -> Latency:
    cdf = tuple((seconds * share / 50, share / 100) for share in range(1, 101))
    return Latency(seconds, 2 * seconds, 3 * seconds, 4 * seconds, 1.2 * seconds, cdf)


def series(running: float) -> Series:
    full = tuple(float((4 + index % 5) * GIB) for index in range(POINTS))
    window, cached, holes = (2.0 * GIB,) * POINTS, (1.0 * GIB,) * POINTS, (0.25 * GIB,) * POINTS
    waiting = tuple(float(index % 7) for index in range(POINTS))
    return Series(
        time_seconds=tuple(10.0 * index for index in range(POINTS)),
        interval_seconds=(10.0,) * POINTS,
        running=tuple(running + index % 3 for index in range(POINTS)),
        waiting=waiting,
        held_bytes={"full": full, "sliding-1024": window},
        cached_bytes={"full": cached, "sliding-1024": cached},
        free_bytes=tuple(16 * GIB - full[i] - window[i] - 2 * cached[i] - holes[i] for i in range(POINTS)),
        hole_bytes=holes,
        waiting_by_reason={"memory": waiting, "slots": (0.0,) * POINTS},
    )


def step(number: int, *segments: SegmentRecord, **changes: Any) -> StepRecord:
    """Return one step of a window; it lasts 20 ms and begins where the one before ends."""
    plain = StepRecord(
        step=number,
        start_seconds=0.02 * number,
        seconds=0.02,
        segments=segments,
        running=len(segments),
        waiting=0,
        reason="",
        moves=0,
        held_bytes={"full": 3 * GIB, "sliding-1024": GIB},
        cached_bytes={"full": GIB, "sliding-1024": 0},
        ended=(),
    )
    return replace(plain, **changes)


def arena_use(**changes: Any) -> ArenaUse:
    """Return where the bytes of an arena of 16 GiB were."""
    plain = ArenaUse(
        bytes=16 * GIB,
        held_share=0.5625,
        cached_share=0.25,
        holes_share=0.02,
        free_share=0.1675,
        waste_share=0.001,
        held_share_while_waiting=0.97,
        held_bytes={"full": 6.0 * GIB, "sliding-1024": 3.0 * GIB},
        cached_bytes={"full": 1.0 * GIB, "sliding-1024": 3.0 * GIB},
    )
    return replace(plain, **changes)


def outcome(policy: str = "shared", *, running: float = 36.0, **changes: Any) -> Outcome:
    """Return one run's figures; `changes` replace whole fields."""
    made = Outcome(
        policy=policy,
        model="gemma-3-27b",
        kv_bytes=16 * GIB,
        workload="mooncake-like",
        device="h200",
        loop="open",
        seconds=400.0,
        wall_seconds=4.25,
        steps=6710,
        digest="00ff" * 16,
        middle_seconds=(0.0, 400.0),
        requests=RequestCounts(600, 590, 4, 1, 5),
        concurrency=Concurrency(running, int(running) + 20, running + 1),
        goodput=Goodput(0.75, 1.5, 10.0, 0.1, False),
        ttft_seconds=latency(2.0),
        tpot_seconds=latency(0.025),
        e2e_seconds=latency(12.0),
        tokens=Tokens(7_200_000, 200_000, 5_000_000, 2_200_000, 1234),
        hit_rate=0.3055,
        retractions=17,
        moves=321,
        moved_bytes=5 * GIB,
        evicted_bytes=90 * GIB,
        arena=arena_use(),
        waiting_seconds={"memory": 1234.5, "slots": 0.0},
        series=series(running),
        pools=(
            PoolShape("full", 16, 1310720, 1310720, 26, None),
            PoolShape("sliding-1024", 16, 6815744, 6815744, 5, None),
        ),
    )
    return replace(made, **changes)


def host_use() -> HostUse:
    """Return what a run made of a host arena of 8 GiB."""
    whole = (2.0 * GIB,) * POINTS
    over_time = HostSeries(
        time_seconds=tuple(10.0 * index for index in range(POINTS)),
        interval_seconds=(10.0,) * POINTS,
        retracted_bytes={"full": (1.0 * GIB,) * POINTS, "sliding-1024": (0.5 * GIB,) * POINTS},
        cached_bytes={"full": whole, "sliding-1024": whole},
        hole_bytes=(0.5 * GIB,) * POINTS,
        free_bytes=whole,
    )
    return HostUse(
        quota_bytes=8 * GIB + 1,
        bytes=8 * GIB,
        held_share=0.6875,
        peak_bytes=7 * GIB,
        retracted_bytes={"full": 1.0 * GIB, "sliding-1024": 0.5 * GIB},
        cached_bytes={"full": 2.0 * GIB, "sliding-1024": 2.0 * GIB},
        offloaded=Copied(17, 3 * GIB, 123_456),
        restored=Copied(15, 2 * GIB, 111_222),
        refused=1,
        dropped=2,
        written=Copied(400, 50 * GIB),
        loaded=Copied(90, 10 * GIB, 800_000),
        write_refused=3,
        device_hit_rate=0.2,
        host_hit_rate=0.1055,
        series=over_time,
    )


def document(*outcomes: Outcome, command: str = "halocline replay trace.jsonl", **setup: str) -> dict[str, Any]:
    """Return the report's one record of some runs (two, when none are given)."""
    from halocline.sim.report.json import document as record

    runs = outcomes or (outcome(), outcome("static:0.8", running=9.0))
    asked = {"trace": "trace.jsonl", "model": "gemma-3-27b", "KV memory": "16 GiB"} | setup
    return record("0.1.0", command, asked, [each.to_dict() for each in runs])
