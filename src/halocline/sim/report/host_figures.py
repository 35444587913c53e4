"""The figures of a host arena: lines that a report has only where some run has one."""

from __future__ import annotations

from collections.abc import Sequence

from halocline.sim.report.figure import Figure, Outcome, Show, count, share, size, value_at

KINDS = {
    "retracted": "of this pool copies of retracted requests, mean over all",
    "cached": "of this pool the second level of the prefix cache, mean over all",
}


def _figure(label: str, path: str, show: Show, unit: str, meaning: str) -> Figure:
    return Figure("host", label, ("host", *path.split(".")), show, unit, meaning)


HOST = (
    _figure("quota", "quota_bytes", size, "bytes", "--host-bytes; what makes no whole slab is left over"),
    _figure(
        "held",
        "held_share",
        share,
        "share of its slabs",
        "copies of retracted requests and cached pages, mean over all",
    ),
    _figure("held at most", "peak_bytes", size, "bytes", "the most bytes of such pages at once"),
    _figure("requests offloaded", "offloaded.times", count, "times", "retractions that left a copy"),
    _figure("tokens offloaded", "offloaded.tokens", count, "tokens", "positions that these copies kept computed"),
    _figure("offloaded", "offloaded.bytes", size, "bytes", "bytes copied for retracted requests, device to host"),
    _figure("requests restored", "restored.times", count, "times", "returns from a copy, without computing again"),
    _figure("tokens restored", "restored.tokens", count, "tokens", "positions that were not computed again for that"),
    _figure("restored", "restored.bytes", size, "bytes", "bytes copied for returns; what the cache had was not"),
    _figure(
        "offloads refused",
        "refused",
        count,
        "times",
        "retractions whose copy did not fit beside other requests' copies",
    ),
    _figure("copies dropped", "dropped", count, "times", "copies freed unread: ended, or the cache had more by then"),
    _figure(
        "prefixes written",
        "written.times",
        count,
        "boundaries",
        "cached boundaries that the device gave up, written back",
    ),
    _figure("written", "written.bytes", size, "bytes", "bytes copied for them, device to host"),
    _figure(
        "writes refused",
        "write_refused",
        count,
        "boundaries",
        "not written, because copies of requests filled the arena",
    ),
    _figure("prefixes loaded", "loaded.times", count, "requests", "requests that came in with what the host had"),
    _figure(
        "tokens loaded", "loaded.tokens", count, "tokens", "prompt tokens of first admissions that only the host had"
    ),
    _figure("loaded", "loaded.bytes", size, "bytes", "bytes copied for loads, host to device"),
    _figure(
        "hit rate, device",
        "device_hit_rate",
        share,
        "share of prompt tokens",
        "prompt tokens of first admissions that the device had, over those looked up",
    ),
    _figure(
        "hit rate, host",
        "host_hit_rate",
        share,
        "share of prompt tokens",
        "those that only the host had, over the same; together they are the hit rate",
    ),
)


def host_figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return all figures of host arenas, those of each pool included."""
    pools: dict[str, None] = {}
    for outcome in outcomes:
        pools |= dict.fromkeys(value_at(outcome, ("host", "retracted_bytes")) or {})
    by_pool = [
        Figure("host", f"{pool} {kind}", ("host", f"{kind}_bytes", pool), size, "bytes", words)
        for kind, words in KINDS.items()
        for pool in pools
    ]
    return [*HOST, *by_pool]
