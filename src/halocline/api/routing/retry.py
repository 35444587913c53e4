"""What is tried again: an attempt whose client has got nothing yet and whose fault another worker may not have.

    fault           happened                                              next attempt goes
    unreachable     no connection                                         to another decode worker
    broken          the connection ended before the answer's first byte   to another decode worker
    lost            the worker was found silent or restarted meanwhile    to another decode worker
    engine          503, code engine_unavailable                          to another decode worker
    overloaded      429, code overloaded                                  to another decode worker
    prefill         503, code prefill_lost                                to another prefill worker, last to none

Everything else that a worker answers is the answer: 4xx is the client's fault, and a 500 of one request (a computation
that failed) would fail elsewhere too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FaultKind = Literal["unreachable", "broken", "lost", "engine", "overloaded", "prefill"]

_KINDS: dict[tuple[int, str], FaultKind] = {
    (503, "engine_unavailable"): "engine",
    (503, "prefill_lost"): "prefill",
    (429, "overloaded"): "overloaded",
}
_CODES: dict[str, FaultKind] = {code: kind for (_, code), kind in _KINDS.items()}
SAYS_DOWN: frozenset[FaultKind] = frozenset({"unreachable", "broken", "engine"})
"""Faults after which a worker gets nothing more until it has answered a probe."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How an attempt failed before its client had got anything."""

    kind: FaultKind
    words: str


def fault_of_answer(status: int, code: str | None, words: str) -> Fault | None:
    """Return the fault that an HTTP answer means; None: it is the answer."""
    kind = _KINDS.get((status, code or ""))
    return None if kind is None else Fault(kind, words)


def fault_of_event(code: str | None, words: str) -> Fault | None:
    """Return the fault that an error event before the first token means; None: it is the answer."""
    kind = _CODES.get(code or "")
    return None if kind is None else Fault(kind, words)


@dataclass(slots=True)
class Attempts:
    """The attempts of one request."""

    most: int
    faults: list[Fault] = field(default_factory=list)
    without: set[str] = field(default_factory=set)
    """Names of workers that are not tried again for this request."""
    can_prefill: bool = True

    @property
    def may_retry(self) -> bool:
        """Whether one more is allowed."""
        return len(self.faults) < self.most

    def failed(self, fault: Fault, decode: str, prefill: str | None) -> None:
        """Note how an attempt at `decode` (its prompt computed by `prefill`) failed."""
        self.faults.append(fault)
        if fault.kind == "prefill" and prefill is not None:
            self.without.add(prefill)
            # The last attempt depends on as little as possible.
            self.can_prefill = len(self.faults) < self.most - 1
        else:
            self.without.add(decode)
