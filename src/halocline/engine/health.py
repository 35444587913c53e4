"""Health means progress: work waiting and nothing admitted, computed or freed for N seconds is unhealthy.

The engine process watches its own turns (`ProgressWatch`); the front end judges (`judge`), because only it can notice
that the engine has fallen silent inside a step or is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from halocline.engine.messages import Snapshot

State = Literal["ok", "draining", "stalled", "silent", "broken", "dead"]


class ProgressWatch:
    """Remembers when work last went forward. Times in seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._has_work = False

    def note(self, now: float, *, progressed: bool, has_work: bool) -> None:
        """Record one turn of the loop."""
        if progressed or not has_work or not self._has_work:
            self._since = now
        self._has_work = has_work

    def stalled_seconds(self, now: float) -> float:
        """How long there has been work without progress; 0 when there is no work."""
        return max(0.0, now - self._since) if self._has_work else 0.0


@dataclass(frozen=True)
class Health:
    """A verdict for a load balancer (`is_healthy`) and the words for a person."""

    state: State
    message: str
    blocked: dict[str, str] | None = None
    about: dict[str, str] = field(default_factory=dict)
    """What this server is to the others of a group: its role, its link address, the id of its life."""

    @property
    def is_healthy(self) -> bool:
        """Whether new requests should be sent here."""
        return self.state == "ok"

    def body(self) -> dict[str, Any]:
        """Return the verdict as /health prints it."""
        body: dict[str, Any] = {"status": self.state, "message": self.message, **self.about}
        return body if self.blocked is None else body | {"blocked": self.blocked}


@dataclass(frozen=True)
class Sight:
    """What a front end sees of its engine at one moment."""

    dead_reason: str | None
    is_draining: bool
    waiting_sequences: int
    """Sequences that the front end still waits for."""
    silent_seconds: float
    """Since the engine's last word."""
    snapshot: Snapshot


def judge(sight: Sight, limit_seconds: float) -> Health:
    """Return the verdict; `limit_seconds` is how long work may stand still."""
    snapshot = sight.snapshot
    blocked = None
    if snapshot.blocked is not None:
        blocked = {"request": snapshot.blocked.request_id, "reason": snapshot.blocked.code}
        blocked["detail"] = snapshot.blocked.detail
    if sight.dead_reason is not None:
        return Health("dead", sight.dead_reason)
    if sight.is_draining:
        return Health("draining", "the server is stopping and takes no new requests")
    if snapshot.stalled_seconds >= limit_seconds:
        waits = f"; request {blocked['request']} waits for {blocked['reason']}: {blocked['detail']}" if blocked else ""
        return Health(
            "stalled",
            f"work waits and nothing was admitted, computed or freed for {snapshot.stalled_seconds:.1f} s "
            f"(limit {limit_seconds:g} s){waits}",
            blocked,
        )
    if sight.waiting_sequences and sight.silent_seconds >= limit_seconds:
        return Health(
            "silent",
            f"the engine has {sight.waiting_sequences} sequences and has said nothing for "
            f"{sight.silent_seconds:.1f} s (limit {limit_seconds:g} s)",
            blocked,
        )
    return Health("ok", "serving")
