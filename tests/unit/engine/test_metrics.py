"""The figures that Prometheus gets: names with units, bytes that add up."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from halocline.engine.messages import Snapshot, TransferFigures
from halocline.engine.metrics import Metrics
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant
from halocline.memory.host import HostArena
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive
from halocline.schedule.figures import HostFigures
from testing.engine import PAGE_BYTES, FakeBackend, FakeScheduler, ids_of
from testing.schedule import FULL_AND_WINDOW, tiny_layout


def snapshot() -> Snapshot:
    scheduler = FakeScheduler(pages=10)
    scheduler.handle(Arrive("a", tuple(ids_of("hi")), SamplingParams(max_tokens=30), 0))
    scheduler.plan(0.0)
    return Snapshot(
        figures=scheduler.figures(), counters={"prompt_tokens": 2}, refusals={"overloaded": 3}, waiting={"memory": 4}
    )


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_arenas_bytes_are_conserved_in_every_scrape() -> None:
    values = samples(Metrics(snapshot, lambda: True, "fake"))
    total, used, holes, free = (values[f"halocline_arena_{name}_bytes"] for name in ("total", "used", "holes", "free"))
    assert used + holes + free == total == 10 * PAGE_BYTES
    assert values["halocline_arena_pool_bytes{owner=running,pool=full}"] == used == 2 * PAGE_BYTES


def test_the_prefix_cache_says_what_it_found_and_why_not_more() -> None:
    scheduler = FakeScheduler(pages=100)
    prompt = tuple(ids_of("x" * 40))
    for name in "abc":
        scheduler.handle(Arrive(name, prompt, SamplingParams(max_tokens=1), 0))
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(FakeBackend("y").run(plan))
    values = samples(Metrics(lambda: Snapshot(figures=scheduler.figures()), lambda: True, "fake"))
    assert values["halocline_prefix_lookup_tokens_total"] == 120
    assert values["halocline_prefix_hit_tokens_total"] == 64
    assert values["halocline_prefix_lookups_total{reason=not keyed}"] == 1
    assert values["halocline_prefix_lookups_total{reason=whole}"] == 2
    assert values["halocline_evicted_pages_total{pool=full}"] == 0
    assert values["halocline_prefix_nodes"] == 1


def test_what_is_cached_is_part_of_what_is_used() -> None:
    figures = snapshot().figures
    assert figures is not None
    pool = replace(figures.arena.pools[0], cached_bytes=3 * PAGE_BYTES, running_bytes=2 * PAGE_BYTES)
    figures = replace(figures, arena=replace(figures.arena, free_bytes=5 * PAGE_BYTES, pools=(pool,)))
    values = samples(Metrics(lambda: Snapshot(figures=figures), lambda: True, "fake"))
    assert values["halocline_arena_cached_bytes"] == 3 * PAGE_BYTES
    assert values["halocline_arena_cached_bytes"] == values["halocline_arena_pool_bytes{owner=cached,pool=full}"]
    assert values["halocline_arena_used_bytes"] == 5 * PAGE_BYTES
    assert figures.cache is not None
    assert figures.cache.cached_bytes == 0, "the fake's own word is not what is exported: one source, the arena"


def test_a_server_without_a_prefix_cache_exports_nothing_of_one() -> None:
    scheduler = FakeScheduler(prefix_cache=False)
    values = samples(Metrics(lambda: Snapshot(figures=scheduler.figures()), lambda: True, "fake"))
    assert not [name for name in values if "prefix" in name or "evicted" in name]


def test_the_host_arena_has_bytes_of_its_own_by_kind() -> None:
    """No byte of it is in the arena's figures (B8): those are the same with and without it."""
    layout = tiny_layout(FULL_AND_WINDOW, 5)
    host = HostArena(layout, 4 * layout.slab_bytes)
    grant = host.reserve("copy of a", Demand((2, 1)))
    assert isinstance(grant, Grant)
    handles = host.store(grant, [np.zeros(2, np.int32), np.zeros(1, np.int32)]).handles[0]
    host.arena.cache(grant, 1, handles[1])
    figures = HostFigures(host.figures(), 1, 5, 3, 2, 1, 700, 600)
    plain = snapshot()
    assert plain.figures is not None
    beside = msgspec.structs.replace(plain, figures=replace(plain.figures, host=figures))
    values = samples(Metrics(lambda: beside, lambda: True, "fake"))
    without = samples(Metrics(snapshot, lambda: True, "fake"))
    full, window = layout.pools
    assert values["halocline_host_total_bytes"] == 4 * layout.slab_bytes
    assert values["halocline_host_pool_bytes{owner=retracted,pool=full}"] == 2 * full.stride_bytes
    assert values[f"halocline_host_pool_bytes{{owner=cached,pool={window.name}}}"] == window.stride_bytes
    counted = [values[f"halocline_host_{name}_total"] for name in ("offloads", "loads", "refusals", "drops")]
    assert (*counted, values["halocline_host_copies"]) == (5, 3, 2, 1, 1)
    assert values["halocline_host_offloaded_bytes_total"] == 700
    assert values["halocline_host_loaded_bytes_total"] == 600
    arena = {name: value for name, value in without.items() if name.startswith("halocline_arena_")}
    assert arena.items() <= values.items()
    assert not any("_host_" in name for name in without), "a server without one exports nothing of it"


def test_requests_refusals_and_waits_are_counted_by_reason() -> None:
    values = samples(Metrics(snapshot, lambda: True, "fake"))
    assert values["halocline_requests{state=decoding}"] == 1
    assert values["halocline_refusals_total{reason=overloaded}"] == 3
    assert values["halocline_waiting{reason=memory}"] == 4
    assert values["halocline_prompt_tokens_total"] == 2
    assert values["halocline_engine_up{model=fake}"] == 1


def test_a_dead_engine_is_down_and_one_that_has_not_spoken_can_be_scraped() -> None:
    values = samples(Metrics(Snapshot, lambda: False, "fake"))
    assert values["halocline_engine_up{model=fake}"] == 0


def test_a_dead_engine_holds_nothing_and_nobody_waits_for_it_but_its_counts_stay() -> None:
    values = samples(Metrics(snapshot, lambda: False, "fake"))
    of_now = ("halocline_requests{", "halocline_waiting{", "halocline_arena_", "halocline_pool_", "halocline_stalled")
    assert not [name for name in values if name.startswith(of_now)]
    assert values["halocline_prompt_tokens_total"] == 2
    assert values["halocline_refusals_total{reason=overloaded}"] == 3
    assert "halocline_admitted_total" in values


def test_every_name_begins_with_ours_and_ends_with_a_unit() -> None:
    unit = re.compile(
        r"_(bytes|seconds|tokens|total|up|requests|waiting|running|pages|transfers|peers|bucket|count|sum|created|nodes)$"
    )
    metrics = Metrics(snapshot, lambda: True, "fake")
    metrics.finished("stop")
    metrics.responded("chat", 200)
    for name in samples(metrics):
        assert name.startswith("halocline_")
        assert unit.search(name.split("{")[0]), name


def test_what_is_staged_and_its_quota_are_gauges_and_all_other_transfer_figures_counters() -> None:
    totals = {"staged_bytes": 300, "staging_bytes": 1000, "sent_bytes": 7}
    said = snapshot()
    values = samples(
        Metrics(lambda: msgspec.structs.replace(said, transfers=TransferFigures(totals=totals)), lambda: True, "fake")
    )
    assert values["halocline_transfer_staged_bytes"] == 300
    assert values["halocline_transfer_staging_bytes"] == 1000
    assert values["halocline_transfer_sent_bytes_total"] == 7
    assert "halocline_transfer_staged_bytes_total" not in values
