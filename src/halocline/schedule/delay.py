"""Prefill delay: new requests wait a moment for others, so that steps with prefills are few and full.

Every step that mixes a prefill in is slower for all who decode. Where requests trickle in, holding the first one back
for `prefill_delay_seconds` lets several share one such step. It is off by default. It never holds back

    while nobody decodes, or a prefill goes on anyway          nothing would be saved
    while requests hold fewer bytes than the low watermark     the device would idle; bytes, so that the mark means the
                                                               same whatever the traffic is
    once a full batch waits, or the time or the steps are up   it is a bound, not a policy
    whoever was let go once                                    a slot, memory or the step's room kept him out then, and
                                                               he has waited his time; who came back from a retraction
                                                               is one of them
"""

from __future__ import annotations

from halocline.memory.arena import Arena
from halocline.schedule.chunk import StepRoom
from halocline.schedule.events import Reason
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules

MOST_DELAY_STEPS = 512
"""The bound in steps, for a clock that stands still."""


class Delay:
    """Remembers since when somebody is held back, and who has been let go."""

    def __init__(self, arena: Arena, rules: Rules, roster: Roster) -> None:
        self._arena = arena
        self._rules = rules
        self._roster = roster
        self._since: float | None = None
        self._steps = 0
        self._let_go = 0
        """Requests that arrived before this one, as arrivals are numbered, are not held back any more."""

    def holds_back(self, room: StepRoom, reasons: dict[str, Reason], now: float) -> bool:
        """Whether nobody is to be admitted in this step; the first who waits gets the reason."""
        limit_seconds = self._rules.prefill_delay_seconds
        if limit_seconds <= 0:
            return False
        first = self._roster.waiting.first()
        if first is None or self._may_come(room, now):
            self._let_go, self._since, self._steps = self._roster.totals.arrived, None, 0
            return False
        if self._since is None:
            self._since = now
        self._steps += 1
        reasons[first.id] = Reason(
            "delay",
            f"{self._waiting_tokens()} of {self._rules.prefill_delay_tokens} tokens wait to be computed, "
            f"{now - self._since:.3f} of at most {limit_seconds} seconds",
        )
        return True

    def _may_come(self, room: StepRoom, now: float) -> bool:
        first = self._roster.waiting.first()
        if first is not None and first.route == "receive":  # it adds no prefill to any step
            return True
        if room.chunks or not len(self._roster.decoding) or self._used_bytes() < self._rules.prefill_delay_low_bytes:
            return True
        if self._steps >= MOST_DELAY_STEPS or self._waiting_tokens() >= self._rules.prefill_delay_tokens:
            return True
        if self._since is not None and now - self._since >= self._rules.prefill_delay_seconds:
            return True
        return any(request.arrival < self._let_go for request in self._roster.waiting)

    def _waiting_tokens(self) -> int:
        tokens = 0
        for request in self._roster.waiting:
            tokens += len(request.history)
            if tokens >= self._rules.prefill_delay_tokens:
                break
        return tokens

    def _used_bytes(self) -> int:
        pools = self._arena.layout.pools
        return sum(held * pool.stride_bytes for held, pool in zip(self._arena.budget.held, pools, strict=True))
