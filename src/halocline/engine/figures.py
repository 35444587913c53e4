"""The engine's snapshot: the scheduler's figures and the step loop's own counts, as the front end gets them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from halocline.engine.core import EngineCore
from halocline.engine.messages import Blocked, Snapshot, TransferFigures


def snapshot_of(core: EngineCore, now: float) -> Snapshot:
    """Return everything that the engine says of itself; `now` in seconds of the core's clock."""
    reasons = core.scheduler.reasons() if core.has_work else {}
    # Whoever waits for something else than its turn is what blocks the others.
    first = next((item for item in reasons.items() if item[1].code != "queue"), next(iter(reasons.items()), None))
    return Snapshot(
        figures=core.scheduler.figures(),
        counters=dict(core.counters),
        refusals=dict(core.rejections),
        waiting=dict(Counter(reason.code for reason in reasons.values())),
        has_work=core.has_work,
        stalled_seconds=core.watch.stalled_seconds(now),
        blocked=None if first is None else Blocked(first[0], first[1].code, first[1].detail),
        transfers=None if core.exchange is None else TransferFigures(**asdict(core.exchange.figures())),
        violations=tuple(core.violations),
    )
