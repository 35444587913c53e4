"""The second level of the prefix cache in /metrics: hits of the host apart from those of the device."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from halocline.engine.messages import Snapshot
from halocline.engine.metrics import Metrics
from halocline.schedule.figures import TierFigures
from testing.engine import FakeScheduler

TIER = TierFigures(
    hit_tokens=48,
    lookups={"host": 2, "not worth it": 1},
    loads=2,
    loaded_bytes=4096,
    written=3,
    written_bytes=9000,
    refused=1,
    nodes=5,
    cached_bytes=8192,
)


def values(tier: TierFigures | None) -> dict[str, float]:
    figures = FakeScheduler().figures()
    assert figures.cache is not None
    figures = replace(figures, cache=replace(figures.cache, tier=tier))
    text = Metrics(lambda: Snapshot(figures=figures), lambda: True, "fake").render().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name + "".join(sample.labels.values())] = sample.value
    return found


def test_hits_of_the_host_are_told_apart_from_those_of_the_device() -> None:
    found = values(TIER)
    assert found["halocline_prefix_host_hit_tokens_total"] == 48
    assert found["halocline_prefix_host_lookups_totalhost"] == 2
    assert found["halocline_prefix_host_lookups_totalnot worth it"] == 1
    assert found["halocline_prefix_host_loaded_bytes_total"] == 4096
    assert found["halocline_prefix_host_written_bytes_total"] == 9000
    assert found["halocline_prefix_host_refusals_total"] == 1
    assert found["halocline_prefix_host_nodes"] == 5


def test_without_a_host_arena_nothing_is_exported_of_one() -> None:
    assert not [name for name in values(None) if name.startswith("halocline_prefix_host")]
