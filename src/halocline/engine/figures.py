"""From the scheduler's and arena's figures to the snapshot that goes to the front end."""

from __future__ import annotations

from halocline.engine.core import EngineCore
from halocline.engine.messages import ArenaSnapshot, Snapshot


def snapshot_of(core: EngineCore, now: float) -> Snapshot:
    """Return the engine's figures now; `now` in seconds of the core's clock."""
    figures = core.scheduler.figures()
    arena = figures.arena
    return Snapshot(
        arena=ArenaSnapshot(
            arena.total_bytes,
            arena.used_bytes,
            arena.holes_bytes,
            arena.free_bytes,
            arena.promised_bytes,
            dict(arena.used_bytes_by_pool),
            dict(arena.used_bytes_by_owner),
        ),
        requests=dict(figures.requests),
        counters={"steps": core.steps, **core.counters},
        refusals=dict(core.rejections),
        has_work=core.has_work,
        stalled_seconds=core.watch.stalled_seconds(now),
        blocked=core.blocked() if core.has_work else None,
        violations=tuple(core.violations),
    )
