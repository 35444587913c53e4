"""What Prometheus scrapes: the engine's snapshot as gauges and counters, and the latencies that clients see.

All names begin with `halocline_` and end with their unit. One registry per front end: two servers in one process (as in
tests) share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halocline.engine.messages import Snapshot, TransferFigures
from halocline.memory.figures import ArenaFigures
from halocline.schedule.figures import CacheFigures, HostFigures, SchedulerFigures, TierFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_TOTALS = {
    "admitted": "admissions, those after a retraction included",
    "retractions": "requests that had to give their memory back and start again",
    "extensions": "grants raised because a request outgrew its estimate",
    "steps": "steps that the engine has carried out",
    "moves": "pages moved within the arena",
    "computed_tokens": "tokens computed",
    "recomputed_tokens": "tokens computed a second time because of a retraction",
    "output_tokens": "tokens generated",
}
_COUNTERS = {
    "prompt_tokens": "tokens of prompts that arrived",
    "defects": "errors inside scheduler or backend that failed requests",
    "audits": "recounts of the arena",
    "violations": "broken laws that a recount found",
}
TRANSFER_TOTALS = {
    "sent_bytes": "bytes that went out over links, frames included",
    "received_bytes": "bytes that came in over links, frames included",
    "sent_page_bytes": "of the bytes that went out, those of pages",
    "received_page_bytes": "of the bytes that came in, those of pages",
    "sent": "prompts computed here for another worker, to their end",
    "received": "prompts computed by another worker for this one, to their end",
    "refused": "messages and chunks that came too late, twice or for a former attempt",
    "retries": "messages sent again because no answer came",
    "attempts_lost": "attempts that ended before their time: lost peers, leases, revocations",
    "leases_lost": "of these, the ones that ended because nothing went on for the lease",
}
"""Counters of transfers: name, meaning. `TransferFigures.totals` has these names, and those of the gauges below."""
_TRANSFER_GAUGES = {
    "staged_bytes": "bytes of pages that are here to be cut into pages of another length",
    "staging_bytes": "the most that `staged_bytes` may be",
}
_CACHE_TOTALS = {
    "prefix_lookup_tokens": "prompt tokens of requests that were admitted for the first time",
    "prefix_hit_tokens": "of these, the ones that the prefix cache had",
    "prefix_shortened": "admissions that used less than was cached, because using all would have taken too much memory",
    "prefix_resumed_tokens": "tokens of retracted requests that were found again instead of computed again",
    "prefix_waits": "requests that waited for a prefix that another one was computing",
}
_STATES = ("waiting", "prefilling", "decoding", "retracted", "receiving", "sending")
_PAGES = ("live", "free", "promised")
_OWNERS = ("running", "locked", "cached", "transfer")


class Metrics:
    """The registry of one front end; `render` is the body of /metrics."""

    def __init__(self, snapshot: Callable[[], Snapshot], is_alive: Callable[[], bool], model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(snapshot, is_alive, model))
        self.first_token_seconds = self._histogram("time_to_first_token_seconds", "from submission", _SECONDS)
        self.token_seconds = self._histogram("time_per_output_token_seconds", "after the first token", _SECONDS)
        self.request_seconds = self._histogram("request_seconds", "from submission to the last token", _SECONDS)
        self.cached_tokens = self._histogram("request_cached_tokens", "tokens of prompts that were cached", _TOKENS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "length of prompts", _TOKENS)
        self.output_tokens = self._histogram("request_output_tokens", "length of outputs", _TOKENS)
        self._finished = Counter(
            "halocline_sequences_finished", "sequences by the reason of their end", ["reason"], registry=self.registry
        )
        self._responses = Counter(
            "halocline_http_responses", "answers by route and status", ["route", "status"], registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"halocline_{name}", text, buckets=buckets, registry=self.registry)

    def finished(self, reason: str) -> None:
        """Count one sequence that has ended: stop, length, abort, or error."""
        self._finished.labels(reason).inc()

    def responded(self, route: str, status: int) -> None:
        """Count one HTTP answer."""
        self._responses.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the latest snapshot at each scrape, so that all figures of one scrape belong together."""

    def __init__(self, snapshot: Callable[[], Snapshot], is_alive: Callable[[], bool], model: str) -> None:
        self._snapshot = snapshot
        self._is_alive = is_alive
        self._model = model

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        alive = self._is_alive()
        up = GaugeMetricFamily("halocline_engine_up", "1 while the engine process lives", labels=["model"])
        up.add_metric([self._model], float(alive))
        yield up
        for family in _engine(self._snapshot()):
            # What it held and who waited ended with it: its last words would show a queue for ever. Counts remain true.
            if alive or family.type == "counter":
                yield family


def _engine(snapshot: Snapshot) -> Iterator[Metric]:
    """All that an engine says of itself: gauges are of now, counters of since the start."""
    if snapshot.figures is not None:
        yield from _requests(snapshot.figures)
        yield from _arena(snapshot.figures.arena)
        if snapshot.figures.cache is not None:
            yield from _cache(snapshot.figures.cache, [pool.name for pool in snapshot.figures.arena.pools])
        if snapshot.figures.host is not None:
            yield from _host(snapshot.figures.host)
    refusals = CounterMetricFamily("halocline_refusals", "requests refused at the door", labels=["reason"])
    for reason, number in snapshot.refusals.items():
        refusals.add_metric([reason], number)
    yield refusals
    waiting = GaugeMetricFamily("halocline_waiting", "requests that wait now, by reason", labels=["reason"])
    for reason, number in snapshot.waiting.items():
        waiting.add_metric([reason], number)
    yield waiting
    if snapshot.transfers is not None:
        yield from _transfers(snapshot.transfers)
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"halocline_{name}", text, value=snapshot.counters.get(name, 0))
    stalled = snapshot.stalled_seconds
    yield GaugeMetricFamily("halocline_stalled_seconds", "how long work has made no progress", value=stalled)


def _transfers(figures: TransferFigures) -> Iterator[Metric]:
    """What goes to other workers and comes from them."""
    sessions = GaugeMetricFamily("halocline_transfers", "transfers between workers by state", labels=["state"])
    for state, number in figures.sessions.items():
        sessions.add_metric([state], number)
    yield sessions
    yield GaugeMetricFamily("halocline_transfer_peers", "workers that are connected now", value=figures.peers)
    text = "bytes of the arena into which pages of other workers are being written"
    yield GaugeMetricFamily("halocline_transfer_landing_bytes", text, value=figures.landing_bytes)
    for name, text in _TRANSFER_GAUGES.items():
        yield GaugeMetricFamily(f"halocline_transfer_{name}", text, value=figures.totals.get(name, 0))
    for name, text in TRANSFER_TOTALS.items():
        yield CounterMetricFamily(f"halocline_transfer_{name}", text, value=figures.totals.get(name, 0))


def _requests(figures: SchedulerFigures) -> Iterator[Metric]:
    states = GaugeMetricFamily("halocline_requests", "requests by state", labels=["state"])
    for state, number in zip(
        _STATES,
        (
            figures.waiting,
            figures.prefilling,
            figures.decoding,
            figures.retracted,
            figures.receiving,
            figures.sending,
        ),
        strict=True,
    ):
        states.add_metric([state], number)
    yield states
    totals = asdict(figures.totals)
    for name, text in _TOTALS.items():
        yield CounterMetricFamily(f"halocline_{name}", text, value=totals[name])
    yield GaugeMetricFamily("halocline_peak_running", "most requests that ran at once", value=totals["peak_running"])


def _arena(arena: ArenaFigures) -> Iterator[Metric]:
    """The bytes of law L13: used + holes + free = total."""
    for name, text, number in (
        ("total", "bytes of all slabs", arena.total_bytes),
        ("used", "bytes of live pages", arena.used_bytes),
        ("holes", "bytes of free pages in slabs that a pool owns", arena.hole_bytes),
        ("free", "bytes of slabs that no pool owns", arena.free_bytes),
        ("promised", "bytes granted and not yet taken", arena.promised_bytes),
        ("cached", "part of the used bytes that nobody needs now: they give way to any demand", arena.cached_bytes),
    ):
        yield GaugeMetricFamily(f"halocline_arena_{name}_bytes", text, value=number)
    used = GaugeMetricFamily("halocline_arena_pool_bytes", "live bytes by pool and owner", labels=["pool", "owner"])
    for pool in arena.pools:
        owned = (pool.running_bytes, pool.locked_bytes, pool.cached_bytes, pool.transfer_bytes)
        for owner, number in zip(_OWNERS, owned, strict=True):
            used.add_metric([pool.name, owner], number)
    yield used
    pages = GaugeMetricFamily(
        "halocline_pool_pages",
        "pages by state: live, free (in its slabs and in free ones, up to its share), promised (granted, not taken)",
        labels=["pool", "state"],
    )
    for pool in arena.pools:
        for state, number in zip(_PAGES, (pool.live_pages, pool.free_pages, pool.promised_pages), strict=True):
            pages.add_metric([pool.name, state], number)
    yield pages
    capacity = GaugeMetricFamily(
        "halocline_pool_capacity_tokens",
        "positions that a pool could hold with all others as they are",
        labels=["pool"],
    )
    for pool in arena.pools:
        capacity.add_metric([pool.name], pool.capacity_tokens)
    yield capacity


def _host(host: HostFigures) -> Iterator[Metric]:
    """The host arena: whose its bytes are, and what retracted requests did with it. No byte of it is the arena's."""
    yield GaugeMetricFamily(
        "halocline_host_total_bytes", "bytes of the host arena's slabs", value=host.arena.total_bytes
    )
    used = GaugeMetricFamily("halocline_host_pool_bytes", "live bytes of the host arena", labels=["pool", "owner"])
    for pool in host.arena.pools:
        cached = pool.used_bytes - pool.running_bytes
        used.add_metric([pool.name, "retracted"], pool.running_bytes)
        used.add_metric([pool.name, "cached"], cached)
    yield used
    yield GaugeMetricFamily("halocline_host_copies", "retracted requests that wait with a copy", value=host.copies)
    for name, text, number in (
        ("offloads", "retractions that left a copy in the host arena", host.offloaded),
        ("loads", "returns from a copy, without computing again", host.restored),
        ("refusals", "copies that did not fit beside others", host.refused),
        ("drops", "copies that were freed unread", host.dropped),
        ("offloaded_bytes", "bytes copied to the host for retracted requests", host.offloaded_bytes),
        ("loaded_bytes", "bytes copied back for them", host.loaded_bytes),
    ):
        yield CounterMetricFamily(f"halocline_host_{name}", text, value=number)


def _cache(cache: CacheFigures, pools: Sequence[str]) -> Iterator[Metric]:
    """What the prefix cache found, and for what reason it did not find more; what it gave up, and what it has."""
    values = (cache.looked_up_tokens, cache.hit_tokens, cache.shortened, cache.resumed_tokens, cache.waited)
    for (name, text), value in zip(_CACHE_TOTALS.items(), values, strict=True):
        yield CounterMetricFamily(f"halocline_{name}", text, value=value)
    lookups = CounterMetricFamily(
        "halocline_prefix_lookups", "first admissions by why the cached prefix was not longer", labels=["reason"]
    )
    for reason, number in cache.lookups.items():
        lookups.add_metric([reason], number)
    yield lookups
    evicted = CounterMetricFamily("halocline_evicted_pages", "cached pages that gave way to a demand", labels=["pool"])
    for pool, number in zip(pools, cache.evicted_pages, strict=True):
        evicted.add_metric([pool], number)
    yield evicted
    yield GaugeMetricFamily("halocline_prefix_nodes", "nodes of the prefix tree now", value=cache.nodes)
    if cache.tier is not None:
        yield from _tier(cache.tier)


def _tier(tier: TierFigures) -> Iterator[Metric]:
    """What the prefix cache's second level, in the host arena, had beyond the device."""
    lookups = CounterMetricFamily(
        "halocline_prefix_host_lookups", "first admissions by what was said of the host arena", labels=["verdict"]
    )
    for verdict, number in tier.lookups.items():
        lookups.add_metric([verdict], number)
    yield lookups
    for name, text, number in (
        ("hit_tokens", "part of the prefix hits that came from the host arena", tier.hit_tokens),
        ("loads", "prefixes that were loaded from the host arena", tier.loads),
        ("loaded_bytes", "bytes copied from the host arena for them", tier.loaded_bytes),
        ("writes", "boundaries that gave way on the device and were written back to the host arena", tier.written),
        ("written_bytes", "bytes copied to the host arena for them", tier.written_bytes),
        ("refusals", "boundaries that were not written back: copies of requests filled the host arena", tier.refused),
    ):
        yield CounterMetricFamily(f"halocline_prefix_host_{name}", text, value=number)
    yield GaugeMetricFamily("halocline_prefix_host_nodes", "nodes of the tree on the host now", value=tier.nodes)
