"""What Prometheus scrapes: the engine's snapshot as gauges and counters, and the latencies that clients see.

All names begin with `halocline_` and end with their unit. One registry per front end: two servers in one process (as in
tests) share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halocline.engine.messages import ArenaSnapshot, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

COUNTER_HELP = {
    "steps": "steps that the engine has carried out",
    "prompt_tokens": "tokens of prompts that arrived",
    "output_tokens": "tokens generated",
    "retractions": "requests that had to give their memory back and start again",
    "reprefilled_tokens": "tokens computed a second time because of a retraction",
    "moves": "pages moved within the arena",
    "defects": "errors inside scheduler or backend that failed requests",
    "audits": "recounts of the arena",
    "violations": "broken laws that a recount found",
}


class Metrics:
    """The registry of one front end; `render` is the body of /metrics."""

    def __init__(self, snapshot: Callable[[], Snapshot], is_alive: Callable[[], bool], model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(snapshot, is_alive, model))
        self.first_token_seconds = self._histogram("time_to_first_token_seconds", "from submission", _SECONDS)
        self.token_seconds = self._histogram("time_per_output_token_seconds", "after the first token", _SECONDS)
        self.request_seconds = self._histogram("request_seconds", "from submission to the last token", _SECONDS)
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
        snapshot = self._snapshot()
        up = GaugeMetricFamily("halocline_engine_up", "1 while the engine process lives", labels=["model"])
        up.add_metric([self._model], float(self._is_alive()))
        yield up
        yield from _arena(snapshot.arena)
        yield _labelled_gauge("halocline_requests", "requests by state", "state", snapshot.requests)
        refusals = CounterMetricFamily("halocline_refusals", "requests refused at the door, by code", labels=["reason"])
        for reason, number in snapshot.refusals.items():
            refusals.add_metric([reason], number)
        yield refusals
        waits = CounterMetricFamily("halocline_waits", "refusals of room to waiting requests", labels=["reason"])
        for reason, number in snapshot.waits.items():
            waits.add_metric([reason], number)
        yield waits
        for name, number in snapshot.counters.items():
            yield CounterMetricFamily(f"halocline_{name}", COUNTER_HELP.get(name, name), value=number)
        yield GaugeMetricFamily(
            "halocline_stalled_seconds", "how long work has made no progress", value=snapshot.stalled_seconds
        )


def _arena(arena: ArenaSnapshot) -> Iterator[Metric]:
    """The bytes of law L13: used + holes + free = total."""
    for name, text, number in (
        ("total", "bytes of all slabs", arena.total_bytes),
        ("used", "bytes of pages that somebody owns", arena.used_bytes),
        ("holes", "bytes of free pages in slabs that a pool owns", arena.holes_bytes),
        ("free", "bytes of slabs that no pool owns", arena.free_bytes),
        ("promised", "bytes granted and not yet taken", arena.promised_bytes),
    ):
        yield GaugeMetricFamily(f"halocline_arena_{name}_bytes", text, value=number)
    yield _labelled_gauge("halocline_arena_pool_bytes", "used bytes by pool", "pool", arena.used_bytes_by_pool)
    yield _labelled_gauge("halocline_arena_owner_bytes", "used bytes by owner", "owner", arena.used_bytes_by_owner)


def _labelled_gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
