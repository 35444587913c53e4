"""What Prometheus scrapes from a router: requests, attempts, workers. All names begin with `halocline_router_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halocline.api.routing.book import Book, Pick

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_WORKER = ("side", "worker")


class RouterMetrics:
    """The registry of one router; `render` is the body of /metrics."""

    def __init__(self, book: Book, active: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Workers(book, active))
        self._responses = self._counter("responses", "answers by route and HTTP status", "route", "status")
        self._sent = self._counter("sent", "attempts by worker", *_PER_WORKER)
        self._affine = self._counter("affine", "attempts at a worker that had seen the prompt's beginning", "side")
        self._alone = self._counter("without_prefill", "attempts whose prompt the decode worker computes itself")
        self._faults = self._counter("faults", "attempts that failed before the client had got anything", "kind")
        self._broken = self._counter("broken_answers", "answers that ended early, after their first byte")
        self._first_byte_seconds = Histogram(
            "halocline_router_first_byte_seconds",
            "from a request's arrival to the first byte of its answer",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"halocline_router_{name}", text, labels, registry=self.registry)

    def responded(self, route: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(route, str(status)).inc()

    def sent(self, pick: Pick, matched: tuple[int, int], *, wanted_prefill: bool) -> None:
        """Count an attempt; `matched` are the bytes of the beginning known at the decode and the prefill worker."""
        for worker, matched_bytes in zip((pick.decode, pick.prefill), matched, strict=True):
            if worker is not None:
                self._sent.labels(worker.side, worker.url).inc()
                self._affine.labels(worker.side).inc(matched_bytes > 0)
        self._alone.inc(wanted_prefill and pick.prefill is None)

    def failed(self, kind: str) -> None:
        """Count an attempt that failed before the client had got anything."""
        self._faults.labels(kind).inc()

    def broke_off(self) -> None:
        """Count an answer that ended early."""
        self._broken.inc()

    def began(self, seconds: float) -> None:
        """Note how long a client waited for its first byte."""
        self._first_byte_seconds.observe(seconds)

    def render(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)


class _Workers(Collector):
    """Gauges of the book."""

    def __init__(self, book: Book, active: Callable[[], int]) -> None:
        self._book = book
        self._active = active

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("halocline_router_requests", "requests being passed on", value=self._active())
        up = GaugeMetricFamily("halocline_router_worker_up", "whether it gets requests", labels=_PER_WORKER)
        flights = GaugeMetricFamily("halocline_router_worker_requests", "attempts there now", labels=_PER_WORKER)
        restarts = GaugeMetricFamily(
            "halocline_router_worker_restarts", "lives seen after the first", labels=_PER_WORKER
        )
        free = GaugeMetricFamily(
            "halocline_router_worker_free_bytes",
            "what it said to be free, less what was sent since",
            labels=_PER_WORKER,
        )
        for each in self._book.workers:
            labels = (each.side, each.url)
            up.add_metric(labels, each.is_up)
            flights.add_metric(labels, len(each.flights))
            restarts.add_metric(labels, each.restarts)
            if each.is_up:
                free.add_metric(labels, each.free_bytes)
        yield from (up, flights, restarts, free)
