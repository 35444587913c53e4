"""Every figure of a replay once: its name for people, its place in the JSON record, its unit and its meaning.

The terminal's table, the page and docs/reference/replay.md are made of this list, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halocline.sim.report.figure import (
    NONE,
    Figure,
    Outcome,
    Show,
    count,
    decimal,
    digest,
    seconds,
    share,
    size,
    small_share,
    span,
    value_at,
    yes_no,
)
from halocline.sim.report.host_figures import host_figures

REASONS = {
    "slots": "as many requests as --max-running-requests allows are running",
    "memory": "what it will hold does not fit beside what is granted",
    "senior-short": "a more senior request was refused memory; juniors get nothing new meanwhile",
    "step-room": "it fits, but the tokens or the room of this step are used up",
    "queue": "it came after the last step was planned",
    "prefix": "another request computes more of its prefix than is cached; it waits a few steps for that",
    "delay": "it waits for a fuller batch of prefills",
}
"""Why the most senior waiting request does not run; all who wait are counted under its reason."""

PERCENTILES = {
    "p50": "the median",
    "p90": "the 90th percentile",
    "p95": "the 95th percentile",
    "p99": "the 99th percentile",
    "mean": "the mean",
}


def _figure(group: str, label: str, path: str, show: Show, unit: str, meaning: str) -> Figure:
    return Figure(group, label, tuple(path.split(".")), show, unit, meaning)


def _latencies(name: str, key: str, what: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(name, f"{name} {part}", (key, part), seconds, "seconds", f"{words} of {what}, over finished requests")
        for part, words in PERCENTILES.items()
    )


MIDDLE = "mean over the run; of a saturated one, over the time in which the queue pressed"

REQUESTS = (
    _figure(
        "requests", "arrived", "requests.arrived", count, "requests", "handed to the scheduler, or sent to the server"
    ),
    _figure("requests", "finished", "requests.finished", count, "requests", "answered whole"),
    _figure(
        "requests",
        "rejected",
        "requests.rejected",
        count,
        "requests",
        "refused at the door: they could never run in this arena",
    ),
    _figure("requests", "failed", "requests.failed", count, "requests", "accepted, then ended by an error"),
    _figure("requests", "aborted", "requests.aborted", count, "requests", "left by their client before the end"),
    _figure(
        "requests",
        "short",
        "requests.short",
        count,
        "requests",
        "finished with fewer tokens than asked (a live server)",
    ),
    _figure(
        "concurrency",
        "mean",
        "concurrency.mean",
        decimal,
        "requests",
        "requests that hold memory (prefill or decode) at once, " + MIDDLE,
    ),
    _figure("concurrency", "peak", "concurrency.peak", count, "requests", "the most that held memory at once"),
    _figure(
        "concurrency",
        "while memory is short",
        "concurrency.mean_while_waiting",
        decimal,
        "requests",
        "the mean over the time in which the first in line waited for memory: what it could hold, not what was asked "
        "of it",
    ),
    _figure(
        "goodput",
        "within the limits",
        "goodput.share",
        share,
        "share of requests",
        "finished with TTFT and TPOT within --ttft-limit and --tpot-limit, over all that arrived and were not aborted",
    ),
    _figure(
        "goodput",
        "per second",
        "goodput.requests_per_second",
        decimal,
        "requests per second",
        "requests within the limits that ended, over the seconds of the run (saturated: while the queue pressed)",
    ),
    _figure(
        "goodput",
        "objective met",
        "goodput.is_met",
        yes_no,
        "yes or no",
        "the 95th percentiles of TTFT and TPOT are within their limits, and nobody was rejected or failed",
    ),
)
TOKENS = (
    _figure("tokens", "prompt", "tokens.prompt", count, "tokens", "prompt tokens of all accepted requests"),
    _figure("tokens", "output", "tokens.output", count, "tokens", "tokens generated"),
    _figure(
        "tokens",
        "computed",
        "tokens.computed",
        count,
        "tokens",
        "positions that steps computed, those computed again included",
    ),
    _figure(
        "tokens",
        "from the cache",
        "tokens.cached",
        count,
        "tokens",
        "prompt tokens of first admissions that the prefix cache had",
    ),
    _figure(
        "tokens",
        "re-prefilled",
        "tokens.recomputed",
        count,
        "tokens",
        "computed once more because a retraction had thrown them away",
    ),
    _figure(
        "tokens",
        "hit rate",
        "hit_rate",
        share,
        "share of prompt tokens",
        "cached over looked-up prompt tokens of first admissions",
    ),
    _figure(
        "memory",
        "retractions",
        "retractions",
        count,
        "times",
        "a running request gave its memory up for a more senior one",
    ),
    _figure("memory", "moves", "moves", count, "pages", "pages moved within the arena to make slabs whole"),
    _figure("memory", "moved", "moved_bytes", size, "bytes", "bytes of the pages moved"),
    _figure("memory", "evicted", "evicted_bytes", size, "bytes", "bytes of cached pages that gave way to a demand"),
)
ARENA = (
    _figure("arena", "slabs", "arena.bytes", size, "bytes", "bytes of all slabs; the shares below are of these"),
    _figure(
        "arena",
        "held",
        "arena.held_share",
        share,
        "share of the arena",
        "pages of running requests and the cached ones that they lock, " + MIDDLE,
    ),
    _figure(
        "arena",
        "held while memory is short",
        "arena.held_share_while_waiting",
        share,
        "share of the arena",
        "the mean over the time in which the first in line waited for memory",
    ),
    _figure(
        "arena",
        "cached",
        "arena.cached_share",
        share,
        "share of the arena",
        "evictable pages of the prefix cache, " + MIDDLE,
    ),
    _figure(
        "arena",
        "holes",
        "arena.holes_share",
        small_share,
        "share of the arena",
        "free pages in slabs that a pool owns, " + MIDDLE,
    ),
    _figure("arena", "free", "arena.free_share", share, "share of the arena", "slabs that no pool owns, " + MIDDLE),
    _figure(
        "arena",
        "waste",
        "arena.waste_share",
        small_share,
        "share of the arena",
        "padding: bytes of held and cached pages that no layer uses, " + MIDDLE,
    ),
)
RUN = (
    _figure(
        "run",
        "seconds",
        "seconds",
        seconds,
        "seconds",
        "from the workload's start to the end of the last request: simulated, or real with --server",
    ),
    _figure(
        "run",
        "means taken",
        "middle_seconds",
        span,
        "seconds, two",
        "from when to when: the whole run, or of a saturated one the time in which the queue pressed",
    ),
    _figure("run", "steps", "steps", count, "steps", "steps that the scheduler planned"),
    _figure(
        "run",
        "wall time",
        "wall_seconds",
        seconds,
        "seconds",
        "what the replay itself took on this machine; the only figure that differs between equal runs",
    ),
    _figure(
        "run",
        "sent late",
        "latest_seconds",
        seconds,
        "seconds",
        "the latest a job was sent (a live server): a client that lags behind measures itself",
    ),
    _figure(
        "run",
        "digest",
        "digest",
        digest,
        "hex digits",
        "of all decisions: equal settings, workload and seed give equal digests",
    ),
)

LATENCIES = (
    *_latencies("TTFT", "ttft_seconds", "the time from arrival to the first token"),
    *_latencies("TPOT", "tpot_seconds", "the time from first to last token, over the tokens after the first"),
    *_latencies("E2E", "e2e_seconds", "the time from arrival to the last token"),
)


def reason_figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return one figure per reason for which somebody waited in some run, the longest wait first."""
    longest: dict[str, float] = {}
    for outcome in outcomes:
        for code, value in (value_at(outcome, ("waiting_seconds",)) or {}).items():
            longest[code] = max(longest.get(code, 0.0), value)
    return [
        Figure("waiting", code, ("waiting_seconds", code), seconds, "request-seconds", REASONS.get(code, code))
        for code in sorted(longest, key=lambda code: (-longest[code], code))
        if longest[code]
    ]


def kind_figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return the mean bytes of each pool, held and cached: over the same time as the shares, which they add up to."""
    pools: dict[str, None] = {}
    for outcome in outcomes:
        pools |= dict.fromkeys(value_at(outcome, ("arena", "held_bytes")) or {})
    words = {"held": "held by requests", "cached": "kept in the prefix cache"}
    return [
        Figure(
            "arena",
            f"{pool} {kind}",
            ("arena", f"{kind}_bytes", pool),
            size,
            "bytes",
            f"of this pool {text}, {MIDDLE}",
        )
        for kind, text in words.items()
        for pool in pools
    ]


def mean_bytes(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return the mean bytes of each pool over the whole run, from its series; empty without one."""
    lasts = value_at(outcome, ("series", "interval_seconds")) or ()
    total = sum(lasts)
    found: dict[str, dict[str, float]] = {}
    for kind in ("held", "cached"):
        pools: Mapping[str, Any] = value_at(outcome, ("series", f"{kind}_bytes")) or {}
        if total:
            found[kind] = {
                pool: sum(value * each for value, each in zip(values, lasts, strict=True)) / total
                for pool, values in pools.items()
            }
    return found


def lines(outcomes: Sequence[Outcome]) -> list[tuple[Figure, list[str]]]:
    """Return every figure that some run has, with the text of each run, in the order of the report."""
    memory = [*ARENA, *kind_figures(outcomes), *host_figures(outcomes)]
    ordered = [*REQUESTS, *LATENCIES, *TOKENS, *memory, *reason_figures(outcomes), *RUN]
    shown = [(figure, [figure.text(outcome) for outcome in outcomes]) for figure in ordered]
    return [(figure, texts) for figure, texts in shown if set(texts) != {NONE}]
